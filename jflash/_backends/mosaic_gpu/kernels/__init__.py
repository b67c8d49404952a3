"""The kernels of Hopper: a file is a kernel with its plan, shared memory and launch, or its plan apart."""
