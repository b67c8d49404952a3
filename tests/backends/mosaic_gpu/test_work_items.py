"""Work dealt out on the device: lists of items, and the kernels that take them and merge pieces."""

import dataclasses
import functools
from typing import Any

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import kernel_families
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER, Family
from short_run import cover

import jflash
from jflash import _autodiff
from jflash._backends.mosaic_gpu import plan as hopper_plan
from jflash._backends.nvidia import deal
from jflash._backends.nvidia.walk import work_items
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import Shares
from jflash._semantics import visibility
from jflash._semantics.spec import Operands, Spec

SIZE = 128
OPS = HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True))
LONG = np.random.default_rng(0).lognormal(7, 1.5, 64).clip(1, 32768).astype(np.int32)
LONG[17] = 32768


def dealt(
    lengths: np.ndarray, queries: int, ctas: int | None = 132, **options: Any
) -> tuple[Spec, Operands, Blocks, Shares | None]:
    """Return a call on pages of 16 keys whose entries have the given lengths, and how its walks are dealt out."""
    array = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    spec, operands = hopper_kernels.canonical_arguments(
        query=array((len(lengths), queries, 8, 8)),
        key=array((4, 16, 2, 8)),
        value=array((4, 16, 2, 8)),
        page_table=jnp.zeros((len(lengths), 2048), jnp.int32),
        key_value_seq_lengths=jnp.asarray(lengths),
        query_offset=jnp.asarray(lengths) - queries,
        is_causal=True,
        **options,
    )
    blocks = -(-queries // 16)
    return spec, operands, Blocks(16, SIZE, 4), Shares.of(spec, 2, blocks, SIZE, ctas)


@pytest.mark.parametrize(
    ("lengths", "queries", "options"),
    [
        (LONG, 1, {}),
        (np.tile(LONG, 5), 1, {}),
        (LONG[:20], 40, dict(local_window_size=(5000, 0))),
        (np.array([32768]), 1, {}),
        (np.full(63, 4096), 1, {}),
        (np.full(100, 6 * SIZE), 1, {}),
        (np.zeros(3, np.int32), 1, {}),
    ],
    ids=["log-normal", "more than 128", "blocks, window", "one", "alike", "each one and a half shares", "nothing"],
)
def test_items(lengths: np.ndarray, queries: int, options: dict[str, Any]):
    """Every tile of every walk has one item, of about one length; the longest walks come first, and pieces before
    all others."""
    spec, operands, blocks, shares = dealt(lengths, queries, **options)
    assert shares is not None
    rows = np.asarray(deal.deal(spec, operands, blocks, shares, OPS))
    assert not hopper_kernels.races_found()
    items, cuts = rows[: shares.items], rows[shares.items :]
    assert len(items) == shares.walks + shares.shares
    assert len(cuts) == shares.cuts
    some = items[items[:, 4] > 0]
    assert not items[len(some) :, 4].any()
    is_piece = some[:, 4] == 2
    assert not is_piece[is_piece.sum() :].any()
    assert is_piece.sum() <= shares.pieces
    of_walk: dict[tuple[int, int], list[int]] = {}
    for index, (batch, block, *_) in enumerate(some):
        of_walk.setdefault((batch, block), []).append(index)
    assert len(of_walk) == shares.walks
    total = some[:, 3].sum()
    longest = max(total / shares.shares, work_items.LEAST)
    spans_of = jax.jit(jax.vmap(lambda batch, block: visibility.key_spans(spec, operands, batch, 1, block * 16, 16)))
    spans = spans_of(*np.array(list(of_walk), np.int32).T)
    walks = []
    for ((batch, block), own), start, stop in zip(
        of_walk.items(), *map(np.asarray, (spans.start, spans.stop)), strict=True
    ):
        tiles = -(-(int(stop) - int(start) // 16 * 16) // SIZE) if start < stop else 0
        walks.append(tiles)
        begin, count = some[own, 2], some[own, 3]
        np.testing.assert_array_equal(begin, np.cumsum([0, *count[:-1]]))
        assert count.sum() == tiles
        assert count.max() <= 1.5 * longest + 2
        np.testing.assert_array_equal(own, own[0] + np.arange(len(own)))
        assert is_piece[own].all() == (len(own) > 1)
        listed = [tuple(cut[:4]) for cut in cuts if cut[3] and tuple(cut[:2]) == (batch, block)]
        assert listed == ([(batch, block, own[0], len(own))] if len(own) > 1 else [])
    assert walks == sorted(walks, reverse=True)


def test_described():
    spec, *_ = dealt(LONG, 1)
    assert "up to 196 items of work, long walks cut into 132ths of all tiles" in hopper_plan.describe(spec, 132)


def test_calls_that_are_not_dealt_out():
    """Few tiles, a device of which the multiprocessors are not known, and lists of tiles."""
    spec, *_, shares = dealt(LONG, 1, ctas=None)
    assert shares is None
    assert Shares.of(spec, 2, 1, 2**14, 132) is None
    assert dealt(LONG, 1, mask_mod=lambda b, h, q, k: k % 2 == 0)[-1] is None
    assert dealt(LONG, 2, mask=jnp.ones((1, 1, 2, 2048 * 16), bool))[-1] is None
    hidden = dealt(LONG, 1, score_mod=lambda s, b, h, q, k: jnp.where(k > 9, s, -jnp.inf))
    assert hidden[-1] is None


FEW_ON_MANY = Case("bfloat16", 290, 700, heads=(1, 1), dims=(64, 64), batch=(), causal=True, offset="end", sinks=True)
SPLIT: dict[str, tuple[Family, Case, dict[str, Any]]] = {
    "hopper": (HOPPER, FEW_ON_MANY, {}),
    "hopper, lists": (HOPPER, FEW_ON_MANY, dict(mask_mod=lambda b, h, q, k: (k // 128 % 2 == 0) | (q == k))),
    "hopper, wide heads": (HOPPER, FEW_ON_MANY._replace(query_length=150, dims=(272, 272)), {}),
    "hopper, rows that no eight divides": (HOPPER, FEW_ON_MANY._replace(query_length=258, dims=(256, 256)), {}),
    "mma": (kernel_families.mma("8.0"), FEW_ON_MANY._replace(key_length=1100), {}),
}


@pytest.mark.parametrize(
    ("family", "case", "options"),
    [pytest.param(*row, marks=[cover(0)] * (name != "mma")) for name, row in SPLIT.items()],
    ids=SPLIT,
)
def test_splits_of_several_blocks(family: Family, case: Case, options: dict[str, Any]):
    """A few hundred queries on many keys, of which some CTAs see none; the first block of queries may lack rows."""
    call = dataclasses.replace(cases.of_forward(cases.build(case)), **options)
    kernel, _ = family.plans(hopper_kernels.canonical(call)[0], 6)
    assert kernel.plan.division.each == 2
    assert kernel.plan.division.blocks >= 3
    oracle.assert_right(hopper_kernels.run(call, 6, family=family), call)


BLOCKS_AND_SPLITS: dict[str, tuple[tuple[int, int, int], dict[str, Any], tuple[int, int]]] = {
    "one block": ((1, 4096, 8), {}, (16, 16)),
    "one block, short": ((1, 512, 8), {}, (2, 2)),
    "a window": ((1, 32768, 8), dict(local_window_size=(1023, 0)), (16, 33)),
    "several blocks": ((512, 32768, 8), {}, (4, 4)),
    "causal": ((1024, 1024, 8), dict(is_causal=True), (2, 2)),
    "several blocks, short": ((512, 512, 8), {}, (1, 1)),
    "several blocks, a window": ((8192, 8192, 1), dict(local_window_size=(255, 0)), (1, 1)),
    "as many blocks as multiprocessors": ((2048, 32768, 9), {}, (1, 1)),
}


@pytest.mark.parametrize(("lengths", "options", "splits"), BLOCKS_AND_SPLITS.values(), ids=BLOCKS_AND_SPLITS)
def test_number_of_splits(lengths: tuple[int, int, int], options: dict[str, Any], splits: tuple[int, int]):
    """As many as idle multiprocessors can share, on an H200 and an H100 by mma.sync."""
    queries, keys, heads = lengths
    query, key = (jnp.zeros((1, length, heads, 128), jnp.bfloat16) for length in (queries, keys))
    spec, _ = hopper_kernels.canonical_arguments(query=query, key=key, value=key, **options)
    families = HOPPER, kernel_families.mma("9.0")
    assert tuple(family.plans(spec, 132)[0].plan.division.each for family in families) == splits


LENGTHS = [(3, 18), (1, 1300), (1, 30), (1, 200), (0, 0), (1, 1)]
SINKS = np.array([-300, -2, 3, 300], np.float32)
ROWS: dict[str, tuple[Family, dict[str, Any]]] = {
    "hopper: decoding, sinks": (HOPPER, dict(lengths=LENGTHS, sinks=SINKS, interleaved=True)),
    "hopper: blocks of 64 tokens, heads of their own, cap, window": (
        HOPPER,
        dict(lengths=[(64, 1200), (3, 129)], spare=(0, 0), heads=(2, 2), soft_cap=5.0, sliding_window=1100),
    ),
    "mma: decoding, sinks": (kernel_families.mma("8.0"), dict(lengths=LENGTHS, sinks=SINKS)),
    "mma: pairs, window": (
        kernel_families.mma("8.0"),
        dict(lengths=[(1, 1500), (1, 40)], interleaved=True, sliding_window=1300, heads=(2, 2), dims=(256, 256)),
    ),
}


CHEAP = "mma: decoding, sinks"


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param(*row, marks=[cover(0)] * (name != CHEAP)) for name, row in ROWS.items()],
    ids=ROWS,
)
def test_ragged(monkeypatch: pytest.MonkeyPatch, family: Family, options: dict[str, Any]):
    """Blocks of the tokens of several sequences, of which one has many keys, with what is none of them 0."""
    ops = family.interpreter(plgpu.InterpretGPUParams(detect_races=True))
    backend = family.backend
    monkeypatch.setattr(backend, "unsupported", lambda spec, platform: backend.unsupported_call(spec))
    # What is between takes nothing that has effects, as the interpreter has.
    pieces: list[int] = []

    def forward(choice: Any, spec: Spec, operands: Operands, names: Any) -> Any:
        kernel, _ = family.plans(spec, 3)
        shares = kernel.plan.shares
        rows = deal.deal(spec, operands, kernel.plan.visits, shares, ops)
        jax.debug.callback(pieces.append, rows[shares.items, 3])
        return family.call.forward(kernel, operands, ops)

    monkeypatch.setattr(_autodiff, "attend", forward)
    step = paged.ragged(page_size=16, dtype="bfloat16", sm_scale=0.25, **(dict(dims=(64, 64)) | options))
    name = backend.__name__.rpartition(".")[2]
    attend = functools.partial(jflash.ragged_paged_attention, implementation=name, return_residual=True)
    paged.assert_ragged_right(attend(**step.arguments), step)
    assert pieces[0] > 1
    assert not hopper_kernels.races_found()
