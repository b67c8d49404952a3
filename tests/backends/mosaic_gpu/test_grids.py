"""Grids of more CTAs than CUDA counts along an axis, in either family of kernels."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from equations import equations
from h200 import H200
from kernel_families import HOPPER, Family, mma
from on_hardware import served_by
from short_run import cover

import jflash
from jflash import _platform
from jflash._backends import mosaic_gpu, mosaic_gpu_mma
from jflash._backends.nvidia import launch

# A long sequence of many heads, many short ones, many of one block, and one query for each of many caches.
LARGE = {
    "long": ((1, 131072, 64, 128), (1, 131072, 8, 128)),
    "longer": ((1, 2**18, 64, 64), (1, 2**18, 64, 64)),
    "short": ((70_000, 16, 4, 64), (70_000, 16, 4, 64)),
    "one block": ((2**14, 128, 32, 128), (2**14, 128, 32, 128)),
    "decoding": ((70_000, 1, 8, 64), (70_000, 24, 2, 64)),
}


def attention(query: Any, key: Any, value: Any, implementation: str, **options: Any) -> Any:
    """Causal attention whose last query is at the last key."""
    options |= dict(is_causal=True, query_offset=key.shape[1] - query.shape[1], implementation=implementation)
    return jflash.attention(query, key, value, **options)


def grids(call: Callable[..., Any], *arrays: Any) -> Iterator[tuple[int, ...]]:
    """The grid of each kernel of a call, as Pallas has it."""
    for equation in equations(jax.make_jaxpr(call)(*arrays).jaxpr):
        if equation.primitive.name == "mpmd_map":
            yield from (mesh.grid for mesh in equation.params["meshes"])


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_gpu_mma"])
@pytest.mark.parametrize("name", LARGE)
def test_cuda_can_launch_every_grid(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cuda": H200})

    def gradients(query: Any, key: Any, value: Any) -> Any:
        attend = lambda *arrays: attention(*arrays, implementation).astype(jnp.float32).sum()
        return jax.grad(attend, argnums=(0, 1, 2))(query, key, value)

    query, key = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in LARGE[name])
    found = list(grids(gradients, query, key, key))
    assert len(found) >= 2
    for sizes in found:
        *others, y, x = 1, 1, *sizes
        assert np.prod(others) < 2**16, sizes
        assert y < 2**16, sizes
        assert x < 2**31, sizes


@pytest.mark.parametrize("options", [{}, pytest.param(dict(bias="full", mask="queries"), marks=cover(0))], ids=str)
@pytest.mark.parametrize("family", [HOPPER, mma("9.0")], ids=["mosaic_gpu", "mosaic_gpu_mma"])
def test_one_axis_of_all_ctas(family: Family, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "MOST_CTAS", 0)
    case = Case("bfloat16", 70, 70, heads=(2, 1), dims=(64, 64), batch=(2,), causal=True, **options)
    call = cases.build(case)
    oracle.assert_right(hopper_kernels.run(call, family=family, detect_races=False), call)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [mosaic_gpu, mosaic_gpu_mma], ids=["mosaic_gpu", "mosaic_gpu_mma"])
@pytest.mark.parametrize("name", ["long", "short", "decoding"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_equals_its_parts(deterministic: bool, name: str, backend: Any):
    """By heads where there is one entry, else by entries; and a second time to the bit, if sums have one order."""
    attend = functools.partial(attention, implementation=served_by(backend), deterministic=deterministic)
    of_query, of_key = LARGE[name]
    shapes, axis = (of_query, of_key, of_key, of_query), 2 if of_query[0] == 1 else 0
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]

    @jax.jit
    def results(*arrays: Any) -> Any:
        *operands, d_out = arrays
        if of_query[0] == 1:
            return [attend(*operands)]
        out, pull_back = jax.vjp(attend, *operands)
        return [out, *pull_back(d_out)]

    halves = zip(*(jnp.split(array, 2, axis) for array in arrays), strict=True)
    parts = zip(*(results(*half) for half in halves), strict=True)
    wholes = results(*arrays)
    if deterministic:
        jax.tree.map(np.testing.assert_array_equal, results(*arrays), wholes)
    out, *gradients = zip(wholes, parts, strict=True)
    np.testing.assert_array_equal(out[0], jnp.concatenate(out[1], axis))
    for whole, of_halves in gradients:
        actual, expected = (np.asarray(array, np.float32) for array in (whole, jnp.concatenate(of_halves, axis)))
        # Row statistics may come from another kernel of XLA, and sums in float32 have another order, which rounds a
        # number of dS in a million to its neighbour.
        allowed = 2**-5 * np.abs(expected).max(axis=-1, keepdims=True) + 2**-12
        assert (np.abs(actual - expected) <= allowed).all()
