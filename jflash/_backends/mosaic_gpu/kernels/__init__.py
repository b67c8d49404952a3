"""The kernels of Hopper: each file is one kernel, its plan, its shared memory, and its launch.

Of `forward` and `backward` plan and main loop are files of their own.
"""
