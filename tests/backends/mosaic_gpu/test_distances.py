"""How the lanes of a warp find the distances from keys to queries, on arrays with an element for each thread."""

from collections.abc import Callable

import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.nvidia.threads import distances

ROWS, COLUMNS = 64, 128


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("first", [0, 100, -70])
def test_lanes_find_the_distances_of_a_tile(first: int, keys_first: bool):
    own = distances.own_distances(Numbers(), np.full(THREAD.size, first).astype(np.uint32), keys_first=keys_first)
    rows, columns = np.arange(ROWS)[:, None], np.arange(COLUMNS)
    np.testing.assert_array_equal(tile(own), first + (columns - rows if keys_first else rows - columns))


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("first", [0, 100, -70])
def test_lanes_find_how_far_keys_are_ahead(first: int, keys_first: bool):
    """Of a thread's elements on one diagonal it is one sum: to the compiler, too, as the same constant is added."""
    own = distances.own_ahead(Numbers(), np.full(THREAD.size, first).astype(np.uint32), keys_first=keys_first)
    rows, columns = np.arange(ROWS)[:, None], np.arange(COLUMNS)
    want = first + (rows - columns if keys_first else columns - rows)
    np.testing.assert_array_equal(tile(lambda *place: own(*place).view(np.int32)), want)


def tile(own: Callable[[int, int, int], np.ndarray]) -> np.ndarray:
    """The tile of which each thread has its elements."""
    warp, lane = np.divmod(THREAD, 32)
    got = np.full((ROWS, COLUMNS), np.nan)
    for eight, half, k in np.ndindex(COLUMNS // 8, 2, 2):
        got[16 * warp + lane // 4 + 8 * half, 8 * eight + 2 * (lane % 4) + k] = own(eight, half, k)
    return got
