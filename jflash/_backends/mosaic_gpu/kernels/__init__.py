"""The kernels of Hopper: each file is one kernel, its plan, its shared memory, and its launch."""
