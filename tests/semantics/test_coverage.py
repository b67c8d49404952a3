"""Tiles of a mask function: what is called empty or full is so, for every function, and what is partial seldom is not."""

import hypothesis
import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import pytest

from jflash._semantics import coverage
from jflash._semantics.coverage import Coverage, Grid
from jflash._semantics.mask_mod import TracedMaskMod, trace_mask_mod

BATCH, HEADS = 2, 4


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
@hypothesis.settings(max_examples=12)
def test_sound(function):
    """Not compiled as a whole, so that each operation is compiled once for all functions."""
    grid = Grid(BATCH, HEADS, 150, 130, tile=32)
    traced = trace_mask_mod(function)
    truth = tiles_of(mask_functions.dense(function, BATCH, HEADS, 150, 130), 32)
    found = by_intervals(traced, grid)
    assert_sound(found, truth)
    precise = coverage.refined(
        traced.mask_mod, traced.arrays, grid._replace(batch=found.some.shape[0]), found, found.partial
    )
    np.testing.assert_array_equal(np.broadcast_to(precise.full, truth.full.shape), truth.full)
    np.testing.assert_array_equal(np.broadcast_to(precise.some, truth.some.shape), truth.some)
