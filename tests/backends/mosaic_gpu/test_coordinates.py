"""How the lanes of a warp find where their elements are, on arrays with an element for each thread."""

from collections.abc import Callable

import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.nvidia.threads import coordinates

ROWS, COLUMNS = 64, 128


@pytest.mark.parametrize("factors", [(1, 0), (0, 1), (1, -1), (-1, 1)])
@pytest.mark.parametrize("of_thread", [coordinates.integers, coordinates.floats])
@pytest.mark.parametrize("first", [0, 4096, -70])
def test_lanes_find_rows_and_columns_and_their_differences(first: int, of_thread: Callable, factors: tuple[int, int]):
    """Elements of a thread on one diagonal have one difference, to the compiler too, as the same constant is added."""
    rows, columns = factors
    element = of_thread(Numbers(), np.full(THREAD.size, first).astype(np.uint32), rows=rows, columns=columns)
    warp, lane = np.divmod(THREAD, 32)
    got = np.full((ROWS, COLUMNS), np.nan)
    for eight, half, k in np.ndindex(COLUMNS // 8, 2, 2):
        number = element(eight, half, k)
        number = number.view(np.int32) if number.dtype == np.uint32 else number
        got[16 * warp + lane // 4 + 8 * half, 8 * eight + 2 * (lane % 4) + k] = number
    row, column = np.indices(got.shape)
    np.testing.assert_array_equal(got, first + rows * row + columns * column)
