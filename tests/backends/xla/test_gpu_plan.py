"""Tests of a call's plan when it is lowered for a GPU, on any machine: few tiles of bounded size, as exact as a
CPU's."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import cases
import jax
import jax.numpy as jnp
import oracle
import pytest
from cases import Case
from h200 import H200
from short_run import cover

import jflash
from jflash import _canonical, _dispatch, _platform
from jflash._backends import xla
from jflash._backends.xla import plans, tiling
from jflash._backends.xla.plans import Blocks
from jflash._platform import Platform

GPUS = [H200, Platform("gpu", "AMD", None), Platform("tpu", "TPU v5", None)]
BUDGET = 2**27
STEPS = [
    ((32, 512, 512, (16, 16)), {}, 1),
    ((16, 1024, 1024, (16, 16)), dict(is_causal=True), 1),
    ((16, 1024, 1024, (32, 32)), {}, 4),
    ((4, 4096, 4096, (16, 16)), {}, 8),
    ((4, 4096, 4096, (16, 16)), dict(is_causal=True), 8),
    ((1, 16384, 16384, (16, 2)), {}, 32),
    ((1, 16384, 16384, (16, 2)), dict(local_window_size=(255, 0)), 16),
    ((1, 16384, 16384, (16, 16)), dict(local_window_size=(1023, 0)), 16),
    ((31, 1000, 1000, (7, 7)), {}, 1),
    ((31, 1000, 1000, (16, 16)), {}, 31),  # a prime number, one by one
    ((128, 1, 131072, (32, 8)), {}, 4),
    ((1, 131072, 77, (64, 64)), {}, 8),
    ((1, 100000, 100000, (1, 1)), {}, 13 * 12),
    ((1, 40000, 1000, (128, 1)), {}, 39),
]
"""Batch, queries, keys, heads; options; tiles, of which a causal call skips some."""


def spec_of(batch: int, queries: int, keys: int, heads: tuple[int, int], **options: Any) -> Any:
    shape = lambda length, heads: jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.float32)
    query, key = shape(queries, heads[0]), shape(keys, heads[1])
    specs: list[Any] = []

    def keep(query: Any, key: Any) -> Any:
        specs.append(_canonical.canonicalize(query, key, key, **options)[0])
        return query

    jax.eval_shape(keep, query, key)
    return specs[0]


@pytest.mark.parametrize(("shape", "options", "steps"), STEPS, ids=str)
def test_tiles_are_few_and_no_larger_than_the_budget(shape: Any, options: dict[str, Any], steps: int):
    spec = spec_of(*shape, **options)
    for platform, work in itertools.product(GPUS, ("forward", "backward")):
        with _platform.lowered_for(platform):
            tiles = plans.plan(spec, work)
        parts = [(spec.batch, tiles.batch), (spec.key_heads, tiles.key_heads), (spec.query_length, tiles.queries)]
        if not tiling.one_tile_for_a_block(spec, tiles):
            parts.append((spec.key_length, tiles.keys))
        assert math.prod(-(-whole // part) for whole, part in parts) == steps
        assert tiles.batch * tiles.key_heads * spec.group * tiles.queries * tiles.keys <= BUDGET * (1 + (steps == 1))
        assert tiling.is_whole(spec, tiles) == (steps == 1)


@pytest.mark.parametrize(
    ("length", "options", "tiles"),
    [
        (512, {}, {"forward": (512, 512), "backward": (512, 512)}),
        (4096, {}, {"forward": (512, 512), "backward": (256, 4096)}),
        (16384, {}, {"forward": (512, 512), "backward": (128, 8192)}),
        (4096, {"is_causal": True}, {"forward": (512, 512), "backward": (512, 512)}),
    ],
    ids=str,
)
def test_a_cpus_backward_holds_rows_that_see_all_keys(
    length: int, options: dict[str, Any], tiles: dict[Literal["forward", "backward"], tuple[int, int]]
):
    spec = spec_of(4, length, length, (16, 16), **options)
    with _platform.lowered_for(Platform("cpu", "cpu", None)):
        planned = {work: plans.plan(spec, work) for work in tiles}
    assert {work: (shape.queries, shape.keys) for work, shape in planned.items()} == tiles
    assert all(shape.key_heads * shape.queries * shape.keys <= 2**20 for shape in planned.values())


OPTIONS = {
    "causal": Case(causal=True, offset="negative", dims=(8, 16)),
    "window": Case(window=40, offset="each", soft_cap=1.5),
    "bias": Case(bias="full", mask="full", sinks=True),
    "lengths": Case(lengths="both", bias="queries", alibi=True),
    "segments": Case(segments="unsorted", causal=True, scale="traced"),
    "score_mod": Case(score_mod="arrays", mask="keys"),
    "dropout": Case(dropout=True, causal=True),
}


@cover(every=7)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [Blocks(48, 48, 2**13), Blocks(64, 131, 2**15)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_right_in_small_tiles(monkeypatch: pytest.MonkeyPatch, option: str, blocks: Blocks, dtype: str):
    """Results are right with a budget for which a small call has many tiles, in some of which a row has all its
    keys."""
    name = f"xla on a GPU, {blocks}"
    monkeypatch.setattr(plans, "GPU", {kind: [blocks] for kind in plans.GPU})
    monkeypatch.setattr(_platform, "current", lambda: GPUS[0])
    monkeypatch.setitem(_dispatch.BACKENDS, name, xla)
    call = cases.build(OPTIONS[option]._replace(dtype=dtype))
    oracle.assert_right(oracle.run(functools.partial(jflash.attention, implementation=name), call), call)


def both(attention: Callable[..., Any]) -> Callable[..., Any]:
    def function(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(attention, query, key, value)
        return out, pull_back(d_out)

    return function


def tangents(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, key, value, tangent: jax.jvp(attention, (query, key, value), (tangent,) * 3)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("part", [both, tangents])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True)], ids=str)
def test_a_short_call_has_no_loop(options: dict[str, Any], part: Any, platform: str):
    """A short call is lowered without a loop, also on a machine without a GPU. On a CPU it is a loop, as is a longer
    one."""
    function = jax.jit(part(functools.partial(jflash.attention, implementation="xla", **options)))

    def loops(length: int, platform: str) -> bool:
        array = jax.ShapeDtypeStruct((32, length, 16, 64), jnp.float32)
        text = function.trace(*[array] * 4).lower(lowering_platforms=(platform,)).as_text()
        return bool(re.search(r"stablehlo\.(while|case|if)\b", text))

    assert not loops(512, platform)
    assert loops(512, "cpu")
    assert loops(1024, platform)


@pytest.mark.parametrize(("dtype", "written"), [("float32", False), ("bfloat16", True)])
def test_products_of_16_bits_are_written_before_they_are_used(dtype: str, written: bool):
    """Products are written first on a GPU, where there are several tiles. The scale is a power of two, so nothing else
    is."""
    function = both(functools.partial(jflash.attention, implementation="xla"))
    traced = jax.jit(function).trace(*[jax.ShapeDtypeStruct((4, 4096, 16, 64), dtype)] * 4)
    barriers = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("optimization_barrier")
        for platform in ("cuda", "cpu")
    }
    assert bool(barriers["cuda"]) == written
    assert not barriers["cpu"]


@pytest.mark.parametrize("part", [both, pytest.param(tangents, marks=cover(0))])
def test_memory_is_a_constant_besides_the_arrays(monkeypatch: pytest.MonkeyPatch, part: Any):
    """Memory is planned by the compiler, with smaller tiles than the true ones. It is a CPU's, and writes more of
    them."""
    budget = 2**24
    monkeypatch.setattr(plans, "GPU", {kind: [Blocks(2048, 2048, budget)] for kind in plans.GPU})
    monkeypatch.setattr(_platform, "current", lambda: GPUS[0])
    monkeypatch.setitem(_dispatch.BACKENDS, "xla in 64 MiB", xla)
    function = part(functools.partial(jflash.attention, is_causal=True, implementation="xla in 64 MiB"))
    used: dict[int, int] = {}
    for length in (8192, 16384):
        arrays = [jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)] * 4
        used[length] = jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    operands_and_output = 4 * 8192 * 8 * 64 * 4
    assert used[16384] - used[8192] <= 3 * operands_and_output
    assert used[8192] <= 6 * 4 * budget + 3 * operands_and_output


def test_few_keys_are_taken_whole():
    """A row is taken whole where it sees few keys, as the log-sum-exp is not exact enough; for many, its sums cost
    passes."""
    with _platform.lowered_for(GPUS[0]):
        few, many = (spec_of(4, 65536, keys, (16, 16)) for keys in (64, 4096))
        assert tiling.holds_rows(few, plans.plan(few, "backward"))
        assert not tiling.holds_rows(many, plans.plan(many, "backward"))
