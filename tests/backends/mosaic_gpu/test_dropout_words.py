"""How the lanes of a warp drop: their instructions, one by one, on arrays with an element for each thread."""

import dropped_words
import jax.numpy as jnp
import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.mosaic_gpu.hardware import dropout_words

ROWS, COLUMNS = 64, 128


@pytest.mark.parametrize("kind", ["signed", "kept"])
@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("dropped", [1, 10000, 32767])
def test_lanes_drop_what_is_said_in_the_plain_way(keys_first: bool, kind: str, dropped: int):
    counter, middle, signed = np.uint32(0xFFFFFFF0), np.uint32(0x12345678), kind == "signed"
    p = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    plain = dropped_words.drop(jnp.asarray(p), counter, middle, dropped, keys_first=keys_first, signed=signed)
    words = dropout_words.Words(Numbers(), counter, middle, dropped, keys_first=keys_first)
    warp, lane = np.divmod(THREAD, 32)
    got = np.full_like(p, np.nan)
    for eight in range(COLUMNS // 8):
        for half in range(2):
            row = 16 * warp + lane // 4 + 8 * half
            columns = 8 * eight + 2 * (lane % 4)[:, None] + np.arange(2)
            choose, values = getattr(words, kind), p[row[:, None], columns]
            chosen = np.stack([choose(values[:, k].copy(), eight, half, k) for k in range(2)], axis=1)
            got[row[:, None], columns] = chosen
    np.testing.assert_array_equal(got, plain)
    # Each word decides for two, and each counter for four.
    each = ROWS * COLUMNS // THREAD.size
    assert (len(words.made), len(words.mixed)) == (each // 2, each // 4)
