"""Tiles of the kernels by `mma.sync`: in the shared memory of each GPU that they serve, of which no compiler knows."""

import dataclasses
import functools
import itertools

import hopper_kernels
import jax.numpy as jnp
import kernel_families
import pytest

from jflash._backends import mosaic_gpu_mma
from jflash._backends.mosaic_gpu_mma import SHARED_MEMORY, plan
from jflash._backends.mosaic_gpu_mma.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu_mma.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu_mma.backward_owned import DqPlan
from jflash._backends.mosaic_gpu_mma.tiles import ForwardTile
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.launch import KernelPlan
from jflash._platform import Platform
from jflash._semantics.spec import Spec

DIMS = (1, 8, 64, 72, 128, 136, 192, 256)
TABLE = jnp.zeros(100)


@functools.cache
def spec_of(head_dim: int, value_dim: int, dtype=jnp.bfloat16, *, queries: int = 100, **options: object) -> Spec:
    key, value = (jnp.zeros((1, 100, 1, dim), dtype) for dim in (head_dim, value_dim))
    options |= dict(bias=jnp.zeros((queries, 100), dtype), score_mod=lambda logit, b, h, q, k: logit + TABLE[q - k])
    return hopper_kernels.canonical_arguments(query=key[:, :queries], key=key, value=value, **options)[0]


def assert_every_kernel_fits(spec: Spec, capability: str) -> None:
    forward, backward = kernel_families.mma(capability).plans(spec, 108)
    found = [kernel.plan for kernel in (forward, *backward)]
    assert any(isinstance(one, DbiasPlan) for one in found)
    (summing,) = (one for one in found if isinstance(one, FusedPlan | DqPlan))
    assert summing.tables.reads
    for one in found:
        assert smem.size(one.launch.smem) <= SHARED_MEMORY[capability], one


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_fits(capability: str):
    for head_dim, value_dim, queries in itertools.product(DIMS, DIMS, (3, 100)):
        spec = spec_of(head_dim, value_dim, queries=queries)
        for one in (spec, dataclasses.replace(spec, deterministic=True)):
            assert_every_kernel_fits(one, capability)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("precision", ["BF16_BF16_F32", None, "highest"])
def test_every_kernel_of_float32_fits_or_the_call_is_refused(precision: str | None, capability: str):
    platform = Platform("gpu", "some GPU", capability, 108)
    room = SHARED_MEMORY[capability] // 1024
    most = {"BF16_BF16_F32": 512, None: 512 if room > 99 else 304, "highest": {99: 208, 163: 336, 227: 480}[room]}
    for *dims, queries in itertools.product((*DIMS, 144, 208), (*DIMS, 144, 208), (3, 100)):
        spec = spec_of(*dims, jnp.float32, queries=queries, precision=precision)
        refusal = mosaic_gpu_mma.unsupported(spec, platform)
        assert (refusal is None) == (sum(smem.round_up(dim, 16) for dim in dims) <= most[precision]), dims
        if refusal is None:
            assert_every_kernel_fits(spec, capability)
        else:
            assert refusal.endswith(f"their tiles do not fit in {room} KiB of shared memory.")


def plans(capability: str, dim: int, dtype=jnp.bfloat16, **arguments: object) -> list[KernelPlan]:
    """The backward's plans: the first makes dQ."""
    query = jnp.zeros((1, 100, 2, dim), dtype)
    spec, _ = hopper_kernels.canonical_arguments(query=query, key=query, value=query, **arguments)
    return [kernel.plan for kernel in kernel_families.mma(capability).plans(spec, 108)[1]]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_forward_tiles_by_form(capability: str):
    """A tile has 128 keys at d64 if a logit is a product times a number and nothing is dropped: others would spill."""
    query, key = jnp.zeros((1, 100, 2, 64), jnp.bfloat16), jnp.zeros(2, jnp.uint32)

    def size(**arguments: object) -> int:
        spec, _ = hopper_kernels.canonical_arguments(query=query, key=query, value=query, **arguments)
        return kernel_families.mma(capability).plans(spec, 108)[0].plan.tile.size

    assert (size(), size(is_causal=True), size(logits_soft_cap=5.0)) == (128, 128, 64)
    assert size(dropout_rate=0.5, dropout_key=key) == 64


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_forward_of_wide_heads(capability: str):
    """O is a pair where P has room beside three tiles, if its columns can be halved, and not on 10.x; others have tiles
    of 64 rows, or, where values are narrower than keys, of 128."""

    def tile(head_dim: int, value_dim: int, **arguments: object) -> ForwardTile:
        query, value = (jnp.zeros((1, 100, 1, dim), jnp.bfloat16) for dim in (head_dim, value_dim))
        spec, _ = hopper_kernels.canonical_arguments(query=query, key=query, value=value, **arguments)
        return kernel_families.mma(capability).plans(spec, 108)[0].plan.tile

    has_room = SHARED_MEMORY[capability] > 104 * 1024 and float(capability) < 10
    assert (tile(256, 256).paired, tile(256, 256, is_causal=True).paired) == (has_room, has_room)
    assert [tile(192, 192).paired, tile(256, 256, logits_soft_cap=5.0).paired] == [False, False]
    assert (tile(192, 128).blocks, tile(192, 192).blocks, tile(128, 256).blocks) == (2, 1, 1)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dim", DIMS)
def test_one_kernel_where_it_fits(dim: int, capability: str):
    """One for dQ, dK and dV, but for heads of 192 and more where there are 99 KiB."""
    fits = SHARED_MEMORY[capability] > 99 * 1024 or dim < 192
    assert isinstance(plans(capability, dim)[0], FusedPlan if fits else DqPlan)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(deterministic=True),
        dict(bias=jnp.zeros((1, 2, 100, 1), jnp.bfloat16)),
        dict(dtype=jnp.float32),
        dict(dtype=jnp.float32, precision="BF16_BF16_F32"),
    ],
    ids=["order", "rows", "float32", "float32 as bfloat16"],
)
def test_sums_with_an_owner(arguments: dict):
    """With deterministic=True every sum has an owner, each that is over keys needs one, and in float32 all have."""
    assert isinstance(plans("8.0", 64, **arguments)[0], DqPlan)


@pytest.mark.parametrize(("capability", "together"), [("8.0", 1), ("8.9", 1), ("9.0", 4), ("12.0", 4)])
def test_additions(capability: str, together: int):
    """`red` of vectors of float32 came with compute capability 9.0."""
    assert plans(capability, 64)[0].together == together


@pytest.mark.parametrize("deterministic", [False, True])
def test_described(deterministic: bool):
    """In words a call has every kernel that it launches, in order."""
    spec = dataclasses.replace(spec_of(64, 64), deterministic=deterministic)
    forward, backward = kernel_families.mma("8.6").plans(spec, 108)
    lines = plan.described(spec, Platform("gpu", "some GPU", "8.6", 108)).splitlines()
    named = [line.strip().split(":")[0] for line in lines if line.startswith("  jflash_mma")]
    assert named == [kernel.plan.launch.name for kernel in (forward, *backward)]
    assert sum("of 99.0 KiB" in line for line in lines) == len(named)
