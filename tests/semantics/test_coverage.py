"""Tiles of mask functions: for every function, what is called empty or full is so."""

import hypothesis
import mask_functions
import numpy as np

from jflash._semantics import coverage
from jflash._semantics.coverage import Coverage, Grid
from jflash._semantics.mask_mod import TracedMaskMod, trace_mask_mod

BATCH, HEADS = 2, 4
EXAMPLES = {"short": 4, "default": 20, "deep": 1000}


def tiles_of(seen: np.ndarray, tile: int) -> Coverage:
    """By looking at all pairs."""
    *outer, queries, keys = seen.shape
    cut = lambda fill: np.pad(
        seen, [(0, 0)] * 2 + [(0, -queries % tile), (0, -keys % tile)], constant_values=fill
    ).reshape(*outer, -(-queries // tile), tile, -(-keys // tile), tile)
    return Coverage(cut(True).all((3, 5)), cut(False).any((3, 5)))


def assert_sound(found: Coverage, truth: Coverage) -> None:
    assert not np.any(found.full & ~truth.full), "called full, and some query does not see some key"
    assert not np.any(truth.some & ~found.some), "called empty, and some query sees some key"


def by_intervals(traced: TracedMaskMod, grid: Grid) -> Coverage:
    return coverage.by_intervals(traced.mask_mod, traced.arrays, grid)[0]


@hypothesis.given(mask_functions.composed(150))
@hypothesis.settings(max_examples=EXAMPLES[hypothesis.settings.get_current_profile_name()])
def test_sound(function):
    """Functions are not compiled as a whole, so that each operation is compiled once for all of them."""
    truth = tiles_of(mask_functions.dense(function, BATCH, HEADS, 150, 130), 32)
    assert_sound(by_intervals(trace_mask_mod(function), Grid(BATCH, HEADS, 150, 130, tile=32)), truth)


@hypothesis.given(mask_functions.composed(150))
def test_second_pass_is_exact(function):
    grid, traced = Grid(BATCH, HEADS, 150, 130, tile=32), trace_mask_mod(function)
    truth = tiles_of(mask_functions.dense(function, BATCH, HEADS, 150, 130), 32)
    found = by_intervals(traced, grid)
    precise = coverage.refined(traced.mask_mod, traced.arrays, grid, found, found.partial)
    np.testing.assert_array_equal(np.broadcast_to(precise.full, truth.full.shape), truth.full)
    np.testing.assert_array_equal(np.broadcast_to(precise.some, truth.some.shape), truth.some)
