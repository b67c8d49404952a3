"""How the lanes of a warp find the distances from keys to queries, on arrays with an element for each thread."""

import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.mosaic_gpu.hardware import distances

ROWS, COLUMNS = 64, 128


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("first", [0, 100, -70])
def test_lanes_find_the_distances_of_a_tile(first: int, keys_first: bool):
    own = distances.own_distances(Numbers(), np.full(THREAD.size, first).astype(np.uint32), keys_first=keys_first)
    warp, lane = np.divmod(THREAD, 32)
    got = np.full((ROWS, COLUMNS), np.nan)
    for eight in range(COLUMNS // 8):
        for half in range(2):
            for k in range(2):
                got[16 * warp + lane // 4 + 8 * half, 8 * eight + 2 * (lane % 4) + k] = own(eight, half, k)
    rows, columns = np.arange(ROWS)[:, None], np.arange(COLUMNS)
    np.testing.assert_array_equal(got, first + (columns - rows if keys_first else rows - columns))
