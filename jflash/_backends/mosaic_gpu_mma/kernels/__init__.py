"""The kernels, each with its algorithm."""
