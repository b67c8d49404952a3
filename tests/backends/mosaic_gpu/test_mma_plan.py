"""Tiles of the kernels by `mma.sync`: in the shared memory of each GPU that they serve, of which no compiler knows."""

import itertools

import hopper_kernels
import jax.numpy as jnp
import kernel_families
import pytest

from jflash._backends.mosaic_gpu.hardware import smem
from jflash._backends.mosaic_gpu_mma.shared_memory import SHARED_MEMORY

DIMS = (1, 8, 64, 72, 128, 136, 192, 256)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_fits(capability: str):
    for head_dim, value_dim in itertools.product(DIMS, DIMS):
        query, value = (jnp.zeros((1, 100, 1, dim), jnp.bfloat16) for dim in (head_dim, value_dim))
        spec, _ = hopper_kernels.canonical_arguments(
            query=query, key=query, value=value, bias=jnp.zeros((100, 100), jnp.bfloat16)
        )
        forward, backward = kernel_families.mma(capability).plans(spec, 108)
        for plan in (forward, backward.dq, *backward.dkv, backward.dbias):
            assert smem.size(plan.launch.smem) <= SHARED_MEMORY[capability], plan
