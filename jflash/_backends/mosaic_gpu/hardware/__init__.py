"""What the kernels ask of a GPU: shared memory, a warpgroup's operations, and how a kernel is launched."""
