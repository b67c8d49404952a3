"""Sums of rows in device memory on Hopper: the order in which threads add them is the one in which they are read."""

import numpy as np
import pytest
from interpreter import sums_of_rows
from lanes import Numbers, Warpgroup

from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.threads.builder import THREADS


@pytest.mark.parametrize("first", [0, 24, 56])
@pytest.mark.parametrize(("columns", "made"), [(16, 32), (48, 64), (64, 64), (80, 80)])
def test_added_rows(columns: int, made: int, first: int):
    """The tile may have more columns than are added."""
    length = 120
    o = Warpgroup(np.dtype(np.float16), 0, np.ones((length, columns), np.float32))
    part = np.random.default_rng(0).normal(size=(64, made)).astype(np.float32)
    pairs = part.reshape(4, 2, 8, made // 8, 4, 2).transpose(3, 1, 0, 2, 4, 5).reshape(-1, THREADS, 2)
    row = o.add(o(first), o.times(o.warp, 16))
    places = sums.Places(o, o.distance(o(0), 1), columns // sums.COLUMNS, row, o(0), 4)
    sums.add_numbers(o, places, list(pairs)[: columns // 4])
    want = np.ones((length, columns), np.float32)
    want[first : first + 64] += part[:, :columns]
    np.testing.assert_array_equal(sums.as_rows(o.device.view(np.float32).reshape(length, columns)), want)


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("columns", [16, 48, 64, 80])
def test_stored_rows(columns: int, words: int):
    """Each number once, where its row and column are."""
    o, rows = Numbers(), 16 * words
    numbers = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    threads = np.asarray(sums_of_rows(numbers)).reshape(-1, THREADS, 2 * words).view(np.uint32)
    found = np.full_like(numbers, 0xFFFF)
    for number, own in enumerate(threads):
        row, column, kept = sums.in_row(o, number, columns // sums.COLUMNS, list(own.T))
        places = column[:, None] + np.arange(2 * words)
        assert (found[row[:, None], places] == 0xFFFF).all()
        found[row[:, None], places] = np.stack(kept, axis=-1).view(np.uint16)
    np.testing.assert_array_equal(found, numbers)
