"""Copies and products by `mma.sync`, thread by thread: what they do with instructions as PTX defines them."""

import jax.numpy as jnp
import numpy as np
import pytest
from lanes import Warpgroup

from jflash._backends.mosaic_gpu.hardware.lane_words import THREADS
from jflash._backends.mosaic_gpu_mma.hardware.copies import Rows, copy_tile
from jflash._backends.mosaic_gpu_mma.hardware.products import RegisterOperand, SmemOperand, multiply
from jflash._backends.mosaic_gpu_mma.hardware.smem_tile import SmemTile

DTYPE = np.dtype(jnp.bfloat16)
COLUMNS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
BASE = 1024


def copied(array: np.ndarray, tile: SmemTile, first: int = 0, limit: int | None = None, base: int = 0) -> Warpgroup:
    """Shared memory with a tile of rows `[length, H]` of the second of three heads."""
    length, columns = array.shape
    device = np.full((length, 3, columns), np.nan, DTYPE)
    device[:, 1] = array
    o = Warpgroup(DTYPE, base + tile.rows * tile.columns * 2, device)
    item = DTYPE.itemsize
    rows = Rows(columns * item, length, columns, 3 * columns * item, item)
    copy_tile(o, rows, tile, o(base), o(first), o(length if limit is None else limit))
    return o


def rows_of(o: Warpgroup, tile: SmemTile, base: int = 0) -> np.ndarray:
    """A tile as `ldmatrix` reads it, for A."""
    operand = SmemOperand(o, tile, o(base), by_warps=True)
    blocks = []
    for block in range(tile.rows // 64):
        words = [word for index in range(tile.columns // 16) for word in operand.fragment(block, index)]
        blocks.append(tile_of(np.asarray(words)))
    return np.concatenate(blocks)


def tile_of(pairs: np.ndarray) -> np.ndarray:
    """`[64, columns]` from an accumulator's registers in their order, `[registers, threads, 2]`."""
    # Eight columns, half; warp, row, pair, neighbour.
    return pairs.reshape(-1, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(DTYPE)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("missing", [0, 8])
def test_copies(columns: int, missing: int):
    """Rows from 5 to 97; the tile goes on, and has more columns than the array."""
    array, tile = normal(150, columns - missing), SmemTile(128, columns)
    got = rows_of(copied(array, tile, first=5, limit=97, base=BASE), tile, base=BASE)
    want = np.zeros((128, columns), DTYPE)
    want[:92, : columns - missing] = array[5:97]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_copies_of_fewer_rows(size: int):
    """Those of all tiles that kernels visit, in the narrowest panels too."""
    for columns in (16, 64, 256):
        array, tile = normal(size, columns), SmemTile(size, columns)
        o = copied(array, tile)
        matrices = SmemOperand(o, tile, o(0), by_warps=False)
        for row in range(0, size, 16):
            for chunk in range(0, columns // 8, 2):
                words = np.asarray(matrices.matrices(row, chunk, rows_first=True, transpose=False))
                # Of the first warp: chunk, half, row, pair, neighbour.
                got = words[:, :32].reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
                np.testing.assert_array_equal(got, array[row : row + 16, 8 * chunk : 8 * chunk + 16])


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("in_registers", [True, False])
def test_products(columns: int, transposed: bool, blocks: int, in_registers: bool):
    """Added to what was there; B is `[columns, K]` or `[K, columns]`, with one dimension 32."""
    right = normal(32, columns)
    b = right.T if transposed else right
    a = normal(64 * blocks, b.shape[0])
    left_tile, right_tile = SmemTile(*a.shape), SmemTile(*right.shape)
    o, size = copied(a, left_tile), a.nbytes
    o.shared = np.concatenate([o.shared, copied(right, right_tile).shared])
    left = SmemOperand(o, left_tile, o(0), by_warps=True)
    if in_registers:
        indices = range(a.shape[1] // 16)
        left = RegisterOperand([[w for i in indices for w in left.fragment(block, i)] for block in range(blocks)])
    pairs = 2 * b.shape[1] // 8
    sums = [[[np.full(THREADS, block + 1, np.float32)] * 2 for _ in range(pairs)] for block in range(blocks)]
    multiply(o, DTYPE, sums, left, SmemOperand(o, right_tile, o(size), by_warps=False), transposed=transposed)
    got = np.concatenate([tile_of(np.stack([np.stack(pair, axis=-1) for pair in block])) for block in sums])
    want = a.astype(np.float64) @ b.astype(np.float64) + np.repeat(np.arange(blocks) + 1, 64)[:, None]
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_bank_conflicts(columns: int):
    """Eight rows of a matrix lie in all 32 banks, whichever the chunk."""
    tile = SmemTile(64, columns)
    o = Warpgroup(DTYPE, 64 * columns * 2, np.zeros(1, DTYPE))
    seen = []
    o.load_matrices = lambda address, offset, transpose: seen.append(address.astype(int) + offset)
    operand = SmemOperand(o, tile, o(0), by_warps=False)
    for chunk in range(0, columns // 8, 2):
        operand.matrices(16, chunk, rows_first=False, transpose=False)
    for addresses in np.asarray(seen).reshape(-1, 8):
        assert len(set(addresses // 16 % 8)) == 8
