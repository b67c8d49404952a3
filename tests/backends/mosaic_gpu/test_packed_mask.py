"""How the lanes of a warp pack a mask: their instructions, one by one, on arrays with an element for each thread."""

import types

import jax.numpy as jnp
import numpy as np
import packed_masks
import pytest
from lanes import THREAD, Numbers

from jflash._backends.nvidia.threads import packed_mask


def exchanged(numbers: np.ndarray, distance: int) -> np.ndarray:
    """`shfl.bfly`."""
    return numbers[THREAD ^ np.uint32(distance)]


def voted(members: np.ndarray, bit: np.ndarray, kind: str) -> np.ndarray:
    """`vote.ballot` of whole warps."""
    assert kind == "ballot"
    assert (members == 0xFFFFFFFF).all()
    words = (bit.reshape(4, 32) * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(axis=1)
    return np.repeat(words, 32).astype(np.uint32)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    utils = types.SimpleNamespace(shfl_bfly=exchanged, nvvm=types.SimpleNamespace(vote_sync=voted))
    monkeypatch.setattr(packed_mask, "mgpu", types.SimpleNamespace(utils=utils))


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(("query", "key"), [(0, 0), (64, 128), (128, 64), (192, 0)])
def test_lanes_pack_what_is_said_in_the_plain_way(query: int, key: int, keys_first: bool):
    mask = np.random.default_rng(0).random((1, 1, 150, 144)) < 0.5
    whole = np.zeros((256, 256), bool)
    whole[:150, :144] = mask[0, 0]

    def read(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        pieces = whole[queries[:, None], keys[:, None] + np.arange(packed_mask.KEYS_PER_LOAD)]
        return (pieces << np.arange(packed_mask.KEYS_PER_LOAD)).sum(axis=1).astype(np.uint32)

    numbers = Numbers()
    make = packed_mask._columns_of_rows if keys_first else packed_mask._rows
    words = make(numbers, read, numbers(query), numbers(key))
    plain = packed_masks.pack(jnp.asarray(mask), 0, query, key, keys_first)
    np.testing.assert_array_equal(words, np.asarray(plain).view(np.uint32))

    tile = whole[query : query + 64, key : key + 64]
    expanded = packed_masks.expand(plain[None], (64, 64))
    np.testing.assert_array_equal(expanded, tile.T if keys_first else tile)


def test_registers_are_in_the_order_in_which_they_are_expanded():
    """Eighths of the columns, and the two halves of the rows; all else of a register's place is the thread's."""
    mgpu = pytest.importorskip("jax.experimental.mosaic.gpu")
    assert mgpu.WGMMA_LAYOUT.registers_shape((64, 128)) == (1, 16, 1, 1, 2, 1, 1, 1, 1)
