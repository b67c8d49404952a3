"""What both families of NVIDIA kernels share: prepared operands, the mathematics of a tile, walks, values of threads.

`mosaic_gpu` (Hopper) and `mosaic_gpu_mma` (every GPU since Ampere) import from here. Nothing here imports from them.
"""
