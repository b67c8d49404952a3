"""The kernels by `mma.sync` compiled for each GPU that they serve, without one: registers spilled, by a written list.

Needs the compiler's wheels: `pip install .[hopper-compiler]`.
"""
