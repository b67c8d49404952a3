"""How the lanes of a warp drop: their instructions, one by one, on arrays with an element for each thread."""

import itertools

import dropped_words
import jax.numpy as jnp
import numpy as np
import pytest
from lanes import THREAD, Numbers

from jflash._backends.nvidia.threads import dropout_words
from jflash._semantics import dropout

ROWS, COLUMNS = 64, 128
WARP, LANE = np.divmod(THREAD, 32)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("dropped", [1, 10000, 0x7C00, 0x7C01, 32767])
def test_lanes_drop_what_is_said_in_the_plain_way(keys_first: bool, signed: bool, dropped: int):
    counter, middle = np.uint32(0xFFFFFFF0), np.uint32(0x12345678)
    p = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    plain_words = dropped_words.words(counter, middle, p.shape, keys_first=keys_first)
    plain = dropped_words.drop(jnp.asarray(p), plain_words, dropped, keys_first=keys_first, signed=signed)
    o = Numbers()
    words = dropout_words.Words(o, counter, middle, keys_first=keys_first)
    got = np.full_like(p, np.nan)
    for sixteen, query, k in itertools.product(range(COLUMNS // 16), range(2), range(2)):
        word = words.word(sixteen, query, k)
        np.testing.assert_array_equal(word, np.asarray(plain_words)[_place(sixteen, query, k)])
        places = [_place(*at, k) for at in dropout_words.decided(sixteen, query, keys_first=keys_first)]
        chosen = dropout_words.chosen(o, word, [p[place] for place in places], dropped, signed=signed)
        for place, number in zip(places, chosen, strict=True):
            got[place] = number
    np.testing.assert_array_equal(got, plain)
    # Each counter serves four.
    assert len(words.mixed) == ROWS * COLUMNS // THREAD.size // 4


def _place(eight: int, half: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a row and a column of each thread."""
    return 16 * WARP + LANE // 4 + 8 * half, 8 * eight + 2 * (LANE % 4) + k


@pytest.mark.parametrize("dropped", [1, 2, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF])
def test_what_is_near_the_limit(dropped: int):
    o, bits = Numbers(), np.clip(dropped + np.arange(-32, 32), 0, dropout.RATES - 1)
    halves = np.concatenate([bits, bits | dropout.RATES]).astype(np.uint32)
    for half, word in enumerate((halves, halves << 16)):
        chosen = dropout_words.chosen(o, word, [np.ones(THREAD.size, np.float32)] * 2, dropped, signed=False)
        np.testing.assert_array_equal(chosen[half], np.tile(bits >= dropped, 2))
