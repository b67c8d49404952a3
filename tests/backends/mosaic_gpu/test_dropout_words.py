"""How the lanes of a warp drop: their instructions, one by one, on arrays with an element for each thread."""

import dropped_words
import jax.numpy as jnp
import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.mosaic_gpu.hardware import dropout_words

ROWS, COLUMNS = 64, 128


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("dropped", [1, 20000, 65535])
def test_lanes_drop_what_is_said_in_the_plain_way(keys_first: bool, signed: bool, dropped: int):
    counter, middle = np.uint32(0xFFFFFFF0), np.uint32(0x12345678)
    p = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    plain = dropped_words.drop(jnp.asarray(p), counter, middle, dropped, keys_first=keys_first, signed=signed)
    words = dropout_words.Words(Numbers(), counter, middle, keys_first)
    warp, lane = np.divmod(THREAD, 32)
    got = np.full_like(p, np.nan)
    for eight in range(COLUMNS // 8):
        for half in range(2):
            row = 16 * warp + lane // 4 + 8 * half
            columns = 8 * eight + 2 * (lane % 4) + np.arange(2)[:, None]
            got[row, columns] = words.drop(p[row, columns], eight, half, dropped, signed=signed)
    np.testing.assert_array_equal(got, plain)
    # Each word decides for two.
    assert len(words.made) == ROWS * COLUMNS // 2 // THREAD.size
