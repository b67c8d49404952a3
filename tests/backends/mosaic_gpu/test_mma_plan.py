"""Tiles of the kernels by `mma.sync`: in the shared memory of each GPU that they serve, of which no compiler knows."""

import dataclasses
import itertools

import hopper_kernels
import jax.numpy as jnp
import kernel_families
import pytest

from jflash._backends.mosaic_gpu.hardware import smem
from jflash._backends.mosaic_gpu_mma.plan import BackwardPlan
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
        _, by_owners = kernel_families.mma(capability).plans(dataclasses.replace(spec, deterministic=True), 108)
        for plan in (forward, *backward.kernels, *by_owners.kernels):
            assert smem.size(plan.launch.smem) <= SHARED_MEMORY[capability], plan


def plans(capability: str, dim: int, **arguments: object) -> BackwardPlan:
    query = jnp.zeros((1, 100, 2, dim), jnp.bfloat16)
    spec, _ = hopper_kernels.canonical_arguments(query=query, key=query, value=query, **arguments)
    return kernel_families.mma(capability).plans(spec, 108)[1]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dim", DIMS)
def test_one_kernel_where_it_fits(dim: int, capability: str):
    """One for dQ, dK and dV, but for heads of 192 and more where there are 99 KiB."""
    fits = SHARED_MEMORY[capability] > 99 * 1024 or dim < 192
    assert (plans(capability, dim).fused is not None) == fits


@pytest.mark.parametrize(
    "arguments", [dict(deterministic=True), dict(bias=jnp.zeros((1, 2, 100, 1), jnp.bfloat16))], ids=["order", "rows"]
)
def test_sums_with_an_owner(arguments: dict):
    """With deterministic=True every sum has an owner, and each that is over keys needs one."""
    found = plans("8.0", 64, **arguments)
    assert found.fused is None
    assert found.dq is not None


@pytest.mark.parametrize(("capability", "together"), [("8.0", 1), ("8.9", 1), ("9.0", 4), ("12.0", 4)])
def test_additions(capability: str, together: int):
    """`red` of vectors of float32 came with compute capability 9.0."""
    assert plans(capability, 64).fused.together == together
