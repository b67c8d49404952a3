"""Copies and products by `mma.sync`, thread by thread: what they do with instructions as PTX defines them."""

import math
import re
import types
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from lanes import Warpgroup

from jflash._backends.mosaic_gpu_mma import device_sums
from jflash._backends.mosaic_gpu_mma.copies import copy_tile, store_words
from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import (
    Chosen,
    RegisterOperand,
    can_pair,
    multiply,
    row_numbers,
)
from jflash._backends.mosaic_gpu_mma.smem_tile import (
    LeftOperand,
    PairedColumns,
    SmemOperand,
    SmemTile,
    TransposedOperand,
)
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._backends.nvidia.threads.device_rows import ColumnChunk, Rows, in_rows, pairs_in_rows, store_in_rows

DTYPE = np.dtype(jnp.bfloat16)
COLUMNS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
BASE = 1024
ONE = Chosen([(0, 0)])
"""The product of operands of one piece."""


def copied(
    array: np.ndarray,
    tile: SmemTile,
    first: int = 0,
    limit: int | None = None,
    base: int = 0,
    part: tuple[int, int] | None = None,
    pieces: int = 1,
) -> Warpgroup:
    """Shared memory with a tile of rows `[length, H]` of the second of three heads; or with the tiles of its pieces."""
    length, columns = array.shape
    device = np.full((length, 3, columns), np.nan, DTYPE)
    device[:, 1] = array
    o = Warpgroup(DTYPE, base + pieces * tile.bytes, device)
    item = DTYPE.itemsize
    rows = Rows(columns * item, length, columns, 3 * columns * item, item)
    own = None if part is None else ColumnChunk(o(part[0]), part[1])
    copy_tile(o, rows, tile, o(base), o(first), o(length if limit is None else limit), own, pieces)
    return o


def rows_of(o: Warpgroup, tile: SmemTile, base: int = 0, piece: int = 0) -> np.ndarray:
    """A tile as `ldmatrix` reads it, for A."""
    operand = LeftOperand(o, tile, o(base)).pieces(piece + 1)[piece]
    blocks = []
    for block in range(tile.rows // 64):
        words = [word for index in range(tile.columns // 16) for word in operand.fragment(block, index)]
        blocks.append(tile_of(np.asarray(words)))
    return np.concatenate(blocks)


def rows_of_pair(o: Warpgroup, pair: list[np.ndarray]) -> np.ndarray:
    """64 rows of two blocks, where each of a warp's 16 rows is said to be."""
    columns = pair[0].shape[1]
    rows = np.full((64, 2 * columns), np.nan)
    for number, block in enumerate(pair):
        first_row, first_column = o.warp_place(columns, number)
        for warp in range(4):
            row, column = int(first_row[32 * warp]), int(first_column[32 * warp])
            rows[row : row + 16, column : column + columns] = block[16 * warp : 16 * warp + 16]
    return rows


def tile_of(pairs: np.ndarray) -> np.ndarray:
    """`[64, columns]` from an accumulator's registers in their order, `[registers, threads, 2]`."""
    # Eight columns, half; warp, row, pair, neighbour.
    return pairs.reshape(-1, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, -1)


@pytest.mark.parametrize("of_pair", [None, 0, 1])
@pytest.mark.parametrize("missing", [0, 8])
@pytest.mark.parametrize("columns", [16, 48, 128])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_stored_rows(dtype: type, columns: int, missing: int, of_pair: int | None):
    """Rows from 5 to 50, where the warps' are, of an array that has the second half of the columns but for some."""
    whole = 4 * columns
    array = np.zeros((60, whole - missing), dtype)
    o = Warpgroup(DTYPE, 0, array)
    item = array.itemsize
    below, beside = o.warp_place(columns, of_pair)
    row, column = 5 + below + o.row, beside + whole // 2
    # What a thread has: eights of columns, halves, and neighbours.
    own_rows = (5 + below + o.row)[:, None, None, None] + 8 * np.arange(2)[:, None]
    eights = (beside + whole // 2 + 2 * o.pair)[:, None, None, None] + 8 * np.arange(columns // 8)[:, None, None]
    numbers = (own_rows * 1000 + eights + np.arange(2)).astype(dtype).transpose(1, 2, 0, 3).reshape(-1, THREADS, 2)
    if item == 2:
        each = in_rows(o, [np.ascontiguousarray(two).view(np.uint32)[:, 0] for two in numbers])
    else:
        each = pairs_in_rows(o, numbers)
    rows = Rows(np.int64(0), len(array), whole - missing, (whole - missing) * item, item)
    store_in_rows(o, rows, each, (row, column), o(50), whole - columns)
    want = np.zeros_like(array)
    for at_row, at_column, number in zip(
        *(
            np.broadcast_to(places, (THREADS, columns // 8, 2, 2)).ravel()
            for places in (own_rows, eights + np.arange(2))
        ),
        numbers.reshape(columns // 8, 2, THREADS, 2).transpose(2, 0, 1, 3).ravel(),
        strict=True,
    ):
        if at_row < 50 and at_column < whole - missing:
            want[at_row, at_column] = number
    np.testing.assert_array_equal(array, want)
    assert array.any()


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


@pytest.mark.parametrize("columns", [16, 80, 192])
@pytest.mark.parametrize("missing", [0, 8])
def test_copies_of_pieces(columns: int, missing: int):
    """Pieces lie side by side in rows, and one behind the other in shared memory."""
    array, tile = normal(150, 3 * (columns - missing)), SmemTile(64, columns)
    o = copied(array, tile, first=5, limit=40, base=BASE, pieces=3)
    for piece, own in enumerate(np.split(array, 3, axis=1)):
        want = np.zeros((64, columns), DTYPE)
        want[:35, : columns - missing] = own[5:40]
        np.testing.assert_array_equal(rows_of(o, tile, BASE, piece), want)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_copies_of_fewer_rows(size: int):
    """Copies are right for all tiles that kernels visit, in the narrowest panels too."""
    for columns in (16, 64, 256):
        array, tile = normal(size, columns), SmemTile(size, columns)
        o = copied(array, tile)
        matrices = SmemOperand(o, tile, o(0))
        for row in range(0, size, 16):
            for chunk in range(0, columns // 8, 2):
                words = np.asarray(matrices.matrices(row, chunk, rows_first=True, transpose=False))
                # Of the first warp: chunk, half, row, pair, neighbour.
                got = words[:, :32].reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, 16)
                np.testing.assert_array_equal(got, array[row : row + 16, 8 * chunk : 8 * chunk + 16])


@pytest.mark.parametrize("columns", [16, 48, 64, 128])
@pytest.mark.parametrize("missing", [0, 8, 24])
@pytest.mark.parametrize("number", [0, 1])
def test_copies_of_a_part(columns: int, missing: int, number: int):
    """One of two parts of the columns, of which the array may lack the last."""
    array, tile = normal(150, 2 * columns - missing), SmemTile(64, columns)
    got = rows_of(copied(array, tile, first=5, limit=40, part=(number * columns, 2 * columns)), tile)
    whole = np.zeros((64, 2 * columns), DTYPE)
    whole[:35, : 2 * columns - missing] = array[5:40]
    np.testing.assert_array_equal(got, whole[:, number * columns :][:, :columns])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("blocks", [1, 2])
def test_stores(columns: int, blocks: int, parts: int):
    """Each warpgroup's columns of a tile, as they are read for A, and with rows and columns exchanged."""
    array, tile = normal(64 * blocks, columns), SmemTile(64 * blocks, columns)
    o, width = Warpgroup(DTYPE, BASE + array.nbytes, np.zeros(1, DTYPE)), columns // parts
    for first in range(0, columns, width):
        own = array[:, first : first + width].reshape(blocks, 4, 2, 8, width // 8, 4, 2)
        # Block; eight, half; warp, row, pair; neighbour.
        words_of_blocks = own.transpose(0, 4, 2, 1, 3, 5, 6).reshape(blocks, -1, 128, 2)
        store_words(o, tile, o(BASE), words_of_blocks, o(first))
    np.testing.assert_array_equal(rows_of(o, tile, BASE), array)
    transposed = TransposedOperand(o, tile, o(BASE))
    for block in range(columns // 64):
        words = [word for index in range(tile.rows // 16) for word in transposed.fragment(block, index)]
        np.testing.assert_array_equal(tile_of(np.asarray(words)), array.T[64 * block :][:64])


def test_sums_of_a_pair():
    """16 columns of each half of 64, of which each warp has one half's."""
    half, first = 32, 16
    o = Warpgroup(DTYPE, 0, np.zeros(device_sums.shape(64, 2 * half), np.float32))
    added = normal(64, 32).astype(np.float32)
    for number in range(2):
        below, beside = o.warp_place(half, number)
        rows = (below + o.row).astype(int)[:, None, None, None] + 8 * np.arange(2)[:, None]
        own = (beside // 2 + 2 * o.pair).astype(int)[:, None, None, None] + 8 * np.arange(2)[:, None, None]
        pairs = added[rows, own + np.arange(2)].transpose(1, 2, 0, 3).reshape(-1, THREADS, 2)
        places = device_sums.Places(o, o.distance(o(0), 1), 2 * half // 16, below, beside + first, 4)
        device_sums.add_numbers(o, places, list(pairs))
    got = o.device.view(np.float32).reshape(8, 4, 8, 4, 2, 2).transpose(0, 2, 1, 4, 3, 5).reshape(64, 64)
    want = np.zeros((64, 64), np.float32)
    want[:, first : first + 16], want[:, half + first : half + first + 16] = added[:, :16], added[:, 16:]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("column", [0, 32])
@pytest.mark.parametrize("row", [0, 24, 32])
def test_sums(row: int, column: int, together: int):
    """Rows, added to what is there."""
    rows, columns, width = 90, 80, 48
    shape = device_sums.shape(rows, columns)
    assert math.prod(shape) == 96 * columns
    o = Warpgroup(DTYPE, 0, np.ones(shape, np.float32))
    added = normal(64, width).astype(np.float32)
    pairs = added.reshape(4, 2, 8, width // 8, 4, 2).transpose(3, 1, 0, 2, 4, 5).reshape(-1, 128, 2)
    first = o.add(o(row), o.warp_place(width, None)[0])
    places = device_sums.Places(o, o.distance(o(0), 1), shape[1], first, o(column), together)
    device_sums.add_numbers(o, places, list(pairs))
    got = o.device.view(np.float32).reshape(12, 5, 128)
    # Group, row; unit, eight, pair, neighbour.
    if together == 4:
        got = got.reshape(12, 5, 8, 4, 2, 2).transpose(0, 2, 1, 4, 3, 5)
    else:
        got = got.reshape(12, 5, 2, 2, 8, 4).transpose(0, 4, 1, 2, 5, 3)
    want = np.ones((160, columns), np.float32)
    want[row : row + 64, column : column + width] += added
    np.testing.assert_array_equal(got.reshape(96, columns), want[:96])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("first", [0, 32])
def test_products_of_some_rows(first: int, transposed: bool):
    """A product takes b's rows from a row on: as columns of the product, or as many as A has columns."""
    left, right = normal(64, 48 if transposed else 32), normal(64, 48)
    left_tile, right_tile = SmemTile(*left.shape), SmemTile(64, 48)
    o = copied(left, left_tile)
    o.shared = np.concatenate([o.shared, copied(right, right_tile).shared])
    b = SmemOperand(o, right_tile, o(left.nbytes + first * right_tile.pitch))
    some = right[first : first + 32].astype(np.float64)
    want = left.astype(np.float64) @ (some.T if transposed else some)
    block = [[np.zeros(THREADS, np.float32)] * 2 for _ in range(want.shape[1] // 4)]
    multiply(o, DTYPE, [block], [LeftOperand(o, left_tile, o(0))], [b], ONE._replace(transposed=transposed))
    got = tile_of(np.stack([np.stack(pair, axis=-1) for pair in block]))
    np.testing.assert_allclose(got, want, atol=1e-4)


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
    left = LeftOperand(o, left_tile, o(0))
    if in_registers:
        indices = range(a.shape[1] // 16)
        left = RegisterOperand([[w for i in indices for w in left.fragment(block, i)] for block in range(blocks)])
    pairs = 2 * b.shape[1] // 8
    sums = [[[np.full(THREADS, block + 1, np.float32)] * 2 for _ in range(pairs)] for block in range(blocks)]
    multiply(o, DTYPE, sums, [left], [SmemOperand(o, right_tile, o(size))], ONE._replace(transposed=transposed))
    got = np.concatenate([tile_of(np.stack([np.stack(pair, axis=-1) for pair in block])) for block in sums])
    want = a.astype(np.float64) @ b.astype(np.float64) + np.repeat(np.arange(blocks) + 1, 64)[:, None]
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("columns", [columns for columns in COLUMNS if can_pair(columns)])
@pytest.mark.parametrize("a_transposed", [True, False])
def test_products_of_a_pair(columns: int, a_transposed: bool):
    """Two blocks of a's 64 rows, each with half of the columns."""
    a, b = normal(64, 64), normal(64, columns)
    tiles = SmemTile(64, 64), SmemTile(64, columns)
    o = copied(a, tiles[0])
    o.shared = np.concatenate([o.shared, copied(b, tiles[1]).shared])
    left = (TransposedOperand if a_transposed else LeftOperand)(o, tiles[0], o(0), paired=True)
    pair = [[[np.zeros(THREADS, np.float32)] * 2 for _ in range(columns // 8)] for _ in range(2)]
    multiply(o, DTYPE, pair, [left], [PairedColumns(o, tiles[1], o(a.nbytes))], ONE)
    blocks = [tile_of(np.stack([np.stack(two, axis=-1) for two in block])) for block in pair]
    want = (a.T if a_transposed else a).astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(rows_of_pair(o, blocks), want, atol=1e-4)


@pytest.mark.parametrize(("steps", "first_column"), [([0, 1], 0), ([2, 3], 32), (range(1, 4), 16)])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("has_others", [False, True])
def test_parts_of_products(steps: list[int], first_column: int, paired: bool, has_others: bool):
    """Some steps in K, and of the columns, or of each half of a pair's, 16 from one on. A is held in registers, whole
    or as many of its columns as these steps reach."""
    a, b = normal(64, 64), normal(64, 128)
    tiles = SmemTile(64, 64), SmemTile(64, 128)
    o = copied(a, tiles[0])
    o.shared = np.concatenate([o.shared, copied(b, tiles[1]).shared])
    rows, blocks = LeftOperand(o, tiles[0], o(0), paired=paired), range(2 if paired else 1)
    held = range(4 if has_others else steps[-1] + 1)
    left = RegisterOperand([[word for k in held for word in rows.fragment(block, k)] for block in blocks])
    right = (PairedColumns if paired else SmemOperand)(o, tiles[1], o(a.nbytes))
    sums = [[[np.zeros(THREADS, np.float32)] * 2 for _ in range(4)] for _ in blocks]
    multiply(o, DTYPE, sums, [left], [right], ONE._replace(steps=steps, first_column=first_column))
    made = [tile_of(np.stack([np.stack(two, axis=-1) for two in block])) for block in sums]
    got = rows_of_pair(o, made) if paired else made[0]
    inner = slice(16 * steps[0], 16 * (steps[-1] + 1))
    columns = [first + first_column + np.arange(16) for first in ((0, 64) if paired else (0,))]
    want = a[:, inner].astype(np.float64) @ b[inner][:, np.concatenate(columns)].astype(np.float64)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_numbers_of_a_pairs_rows():
    """Each lane has those of its rows in both blocks."""
    numbers = np.arange(64, dtype=np.float32)
    o = Warpgroup(DTYPE, BASE + numbers.nbytes, np.zeros(1, DTYPE))
    o.shared[BASE:] = numbers.view(np.uint8)
    for number, halves in enumerate(row_numbers(o, o(BASE))):
        for half, got in enumerate(halves):
            np.testing.assert_array_equal(got, o.warp_place(0, number)[0] + o.row + 8 * half)


def test_columns_of_pairs():
    assert [columns for columns in COLUMNS if can_pair(columns)] == [32, 64, 128, 256]


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_bank_conflicts(columns: int):
    """Eight rows of a matrix lie in all 32 banks, whichever the chunk."""
    tile = SmemTile(64, columns)
    o = Warpgroup(DTYPE, 64 * columns * 2, np.zeros(1, DTYPE))
    seen = []
    o.load_matrices = lambda address, offset, transpose: seen.append(address.astype(int) + offset)
    operand = SmemOperand(o, tile, o(0))
    for chunk in range(0, columns // 8, 2):
        operand.matrices(16, chunk, rows_first=False, transpose=False)
    for addresses in np.asarray(seen).reshape(-1, 8):
        assert len(set(addresses // 16 % 8)) == 8


@pytest.mark.parametrize(
    "issue",
    [
        lambda o, words: o.multiply("bf16", [(words[:4], words[:2])] * 3, words[:4]),
        lambda o, words: o.change_where("clear", "lt", words[2], 7, words[:2]),
        lambda o, words: o.change_where("negate", "gtu", words[2], 7, words[:2]),
    ],
    ids=["multiply", "clear", "negate"],
)
def test_results_are_written_last(monkeypatch: pytest.MonkeyPatch, issue: Callable[[Lanes, list[str]], object]):
    """The compiler may give a result the register of an operand: nothing reads one after a result is written."""
    issued: list[tuple[str, int]] = []

    def record(ptx: str, *_: object, result_types: Sequence[object], **__: object) -> list[str]:
        issued.append((ptx, len(result_types)))
        return ["result"] * len(result_types)

    monkeypatch.setattr(mgpu.utils, "inline_ptx", record)
    monkeypatch.setattr(Lanes, "__call__", lambda self, value: value)
    o = object.__new__(Lanes)
    o.zero = types.SimpleNamespace(type="f32")
    issue(o, ["word"] * 4)
    ((ptx, results),) = issued
    named = [int(number) for number in re.findall(r"\$(\d+)", ptx)]
    assert named[named.index(0) :] == list(range(results))
