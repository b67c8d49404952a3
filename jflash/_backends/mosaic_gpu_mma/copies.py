"""What a warpgroup copies between device memory and shared memory or registers, row by row and within bounds.

Rows of 16-bit numbers come to shared memory by `cp.async`, 16 bytes to a thread, which writes zeros in the place of
rows past a limit and columns past an array's. So padding may hold anything, and arrays need no room behind their end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.products import own_place, words
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK, SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder

_SCALAR = plgpu.Layout.WG_SPLAT(())
_TILE = plgpu.Layout.WGMMA
_utils: Any = mgpu.utils


class Part(NamedTuple):
    """Some columns of a tile's `whole` number: those from `first` on, a multiple of 8."""

    first: Any
    whole: int


def copy_rows(source: Ref, target: Ref, first: Any, limit: Any, part: Part | None = None) -> None:
    """Begin to copy rows `[L, H]`, from `first` on, to a tile `[rows, columns]`; zeros for those from `limit` on, which
    is at most L.

    The tile may have a part of the columns alone. Pieces lie side by side in rows, and are tiles of `[pieces, rows,
    columns]`.
    """
    given = [] if part is None else [jnp.int32(part.first)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, *[_SCALAR] * len(given)))
    def copy(_: Any, source: Any, target: Any, first: Any, limit: Any, *column: Any) -> None:
        o = Lanes()
        base = o.shared_address(target)
        *pieces, length, columns = _utils.ir.MemRefType(target.type).shape
        tile, number = SmemTile(length, columns), math.prod(pieces)
        own = None if part is None else Part(column[0].registers.item(), part.whole)
        copy_tile(o, Rows.of(o, source), tile, base, first.registers.item(), limit.registers.item(), own, number)

    call: Any = copy
    call(source, target, jnp.int32(first), jnp.int32(limit), *given)


def copy_tile(
    o: Lanes,
    rows: Rows,
    tile: SmemTile,
    base: Any,
    first: Any,
    limit: Any,
    part: Part | None = None,
    pieces: int = 1,
) -> None:
    """Begin the copies of a tile, or of its pieces; a thread copies the same chunk of a panel's rows that are a fixed
    number apart."""
    thread, together = o.add(o.times(o.warp, 32), o.lane), THREADS // tile.chunks
    own_row, own_chunk = o.arith.divui(thread, o(tile.chunks)), o.arith.remui(thread, o(tile.chunks))
    row = o.add(first, own_row)
    target = o.add(base, o.times(own_row, tile.pitch), tile.permuted(o, own_row, own_chunk))
    other_columns = 0
    if part is not None:
        own_chunk, other_columns = o.add(own_chunk, o.right(part.first, 3)), part.whole - tile.columns
    source, columns = rows.address(o, row, o.times(own_chunk, CHUNK)), rows.columns // pieces
    for index in range(0, tile.rows, together):
        is_there = o.below(o.add(row, o(index)), limit)
        # A copy of nothing writes zeros: past the tile there must be none.
        is_in_tile = o.below(own_row, o(tile.rows - index)) if index + together > tile.rows else None
        for chunk in range(0, tile.panels * tile.chunks, tile.chunks):
            is_inside = is_there
            if (chunk + tile.chunks) * CHUNK + other_columns > columns:
                has_column = o.below(o.add(own_chunk, o(chunk)), o(columns // CHUNK))
                is_inside = o.arith.andi(is_there, has_column)
            size = o.arith.select(is_inside, o(16), o(0))
            for piece in range(pieces):
                place = piece * tile.bytes + tile.place(index, chunk)
                at = index * rows.pitch + 16 * chunk + piece * columns * rows.item_bytes
                o.copy_chunk(target, source, (place, at), size, is_in_tile)


def copy_numbers(source: Ref, target: Ref, first: Any) -> None:
    """Begin to copy float32 numbers of `[L]`, from `first` on, to shared memory: as many as `target` has, up to 128."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR))
    def copy(_: Any, source: Any, target: Any, first: Any) -> None:
        o = Lanes()
        thread = o.add(o.times(o.warp, 32), o.lane)
        own = o.add(o.shared_address(target), o.times(thread, 4))
        start = o.arith.addi(o.device_address(source), o.distance(o.add(first.registers.item(), thread), 4))
        (number,) = _utils.ir.MemRefType(target.type).shape
        o.copy_number(own, start, o.below(thread, o(number)))

    call: Any = copy
    call(source, target, jnp.int32(first))


def commit() -> None:
    """Make a group of the copies that began since the last one."""
    _instruction("cp.async.commit_group;")


def wait(pending: int, warpgroups: int) -> None:
    """Wait until a thread's copies are done but for those of the last `pending` groups, and `meet`: then those of all
    threads are seen."""
    _instruction(f"cp.async.wait_group {pending};")
    meet(warpgroups)


def meet(warpgroups: int) -> None:
    """Wait until all threads of the CTA are here, and see what they wrote to shared memory."""
    if warpgroups == 1:
        plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()
    else:
        plgpu.inline_mgpu()(lambda _: _utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True))()


def store_tile(values: Sequence[Float[Array, "64 columns"]], target: Ref, first_column: Any) -> None:
    """Store blocks of 64 rows of 16-bit numbers in a tile `[rows, M]` of shared memory, from a column on."""

    @plgpu.inline_mgpu(arg_types=((_TILE,) * len(values), plgpu.RefType(), _SCALAR))
    def store(_: Any, values: Any, target: Any, first: Any) -> None:
        o = Lanes()
        base = o.shared_address(target)
        tile = SmemTile(*_utils.ir.MemRefType(target.type).shape)
        store_words(o, tile, base, list(map(words, values)), first.registers.item())

    call: Any = store
    call(tuple(values), target, jnp.int32(first_column))


def store_words(o: Lanes, tile: SmemTile, base: Any, blocks: Sequence[Sequence[Any]], first: Any) -> None:
    """Store each block's words, in the order of an accumulator's registers, in a tile whose panels have 64 columns.

    They have whole panels' columns, or half of one's; the first is a multiple of their number.
    """
    first_chunk = o.right(first, 3)
    panel, own_chunk = o.right(first_chunk, 3), o.arith.andi(first_chunk, o(7))
    row = o.add(o.times(o.warp, 16), o.row)
    start = o.add(base, o.times(panel, tile.rows * tile.pitch), o.times(row, tile.pitch), o.left(o.pair, 2))
    places: dict[int, Any] = {}
    for block, words_of_block in enumerate(blocks):
        for index, word in enumerate(words_of_block):
            eight, half = divmod(index, 2)
            chunk = eight % tile.chunks
            if chunk not in places:
                places[chunk] = o.add(start, tile.permuted(o, row, o.arith.ori(own_chunk, o(chunk))))
            o.store_word(places[chunk], tile.place(block * WARPGROUP_ROWS + 8 * half, eight - chunk), word)


def store_rows(
    values: Float[Array, "64 D"],
    target: Ref,
    first: Any,
    limit: Any,
    part: Part | None = None,
    of_pair: int | None = None,
) -> None:
    """Store rows, from `first` on, in `[L, D]`; but for those from `limit` on and columns past D, a multiple of 8.

    They may have a part of the columns alone, and be one block `of_pair`.
    """
    given = [] if part is None else [jnp.int32(part.first)]
    other_columns = 0 if part is None else part.whole - values.shape[1]

    @plgpu.inline_mgpu(arg_types=(_TILE, plgpu.RefType(), _SCALAR, _SCALAR, *[_SCALAR] * len(given)))
    def store(_: Any, values: Any, target: Any, first: Any, limit: Any, *first_column: Any) -> None:
        o = Lanes()
        rows = Rows.of(o, target)
        below, beside = own_place(o, values.shape[1], of_pair)
        row = o.add(first.registers.item(), below, o.row)
        column = o.add(beside, *(one.registers.item() for one in first_column))
        if rows.item_bytes == 2:
            each = in_rows(o, words(values))
        else:
            pair = _utils.ir.VectorType.get((2,), o.type)
            each = pairs_in_rows(o, [_utils.bitcast(two, pair) for two in values.registers.flat])
        store_in_rows(o, rows, each, (row, column), limit.registers.item(), other_columns)

    call: Any = store
    call(values, target, jnp.int32(first), jnp.int32(limit), *given)


Stored = tuple[int, int, Any, Sequence[Any]]
"""Of two neighbouring words: which half of 16 rows; a column, to which that of the thread is to be added; and they."""


def in_rows(o: ThreadBuilder, words: Sequence[Any]) -> Iterator[Stored]:
    """What threads store of an accumulator's words of 16-bit numbers.

    Of two words of neighbouring eights of columns one is exchanged with the next thread. So a warp stores 32 bytes of
    each row at a time, as much as device memory is written in.
    """
    is_odd = o.arith.cmpi(o.arith.CmpIPredicate.ne, o.arith.andi(o.pair, o(1)), o(0))
    own_column = o.add(o.left(o.arith.andi(o.pair, o(2)), 1), o.arith.select(is_odd, o(8), o(0)))
    for place, half in itertools.product(range(len(words) // 4), range(2)):
        two = words[4 * place + half], words[4 * place + 2 + half]
        yield half, 16 * place, own_column, o.side_by_side(is_odd, two)


def pairs_in_rows(o: ThreadBuilder, pairs: Iterable[Any]) -> Iterator[Stored]:
    """Likewise of its numbers of 32 bits, in pairs as threads have them: 32 bytes of each row."""
    for index, pair in enumerate(pairs):
        eight, half = divmod(index, 2)
        yield half, 8 * eight, o.times(o.pair, 2), o.numbers(pair)


def store_in_rows(
    o: Lanes, rows: Rows, each: Iterable[Stored], first: tuple[Any, Any], limit: Any, other_columns: int
) -> None:
    """Store words in rows below `limit` and columns that there are; `first` are a thread's first row and its warp's
    first column, which is one of `other_columns` at most."""
    row, column = first
    is_there = [o.below(o.add(row, o(8 * half)), limit) for half in range(2)]
    for half, ahead, own_column, two in each:
        own = o.add(column, own_column)
        start, is_inside = rows.address(o, row, own), is_there[half]
        if ahead + 16 + other_columns > rows.columns:
            is_inside = o.arith.andi(is_inside, o.below(o.add(own, o(ahead)), o(rows.columns)))
        offset = 8 * half * rows.pitch + ahead * rows.item_bytes
        o.store_in_row(start, offset, two, is_inside)


def load_device_rows(
    source: Ref, first: Any, limit: Any, pieces: int, column: int, width: int
) -> tuple[tuple[Float[Array, "64 width"], ...], ...]:
    """64 rows of 16-bit numbers of `[L, H]` in device memory, from `first` on, of each of the pieces that lie side by
    side in rows some columns, a multiple of 16; zeros for rows from `limit` on and columns past a piece's."""
    results = (plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, width), jnp.dtype(source.dtype), layout=_TILE),) * pieces

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=results)
    def load(_: Any, source: Any, first: Any, limit: Any) -> Any:
        o = Lanes()
        rows = Rows.of(o, source)
        columns = rows.columns // pieces
        row = o.add(first.registers.item(), o.times(o.warp, 16), o.row)
        start, is_there = rows.address(o, row, o.times(o.pair, 2)), [o.below(row, limit.registers.item())]
        is_there.append(o.below(o.add(row, o(8)), limit.registers.item()))
        pair = _utils.ir.VectorType.get((2,), _utils.ir.MemRefType(source.type).element_type)

        def two(piece: int, eight: int, half: int) -> Any:
            """Two neighbours, in the lower or upper of 16 rows."""
            own = column + 8 * eight
            if own >= columns:
                return _utils.bitcast(o(0), pair)
            place = 8 * half * rows.pitch + (piece * columns + own) * rows.item_bytes
            # Rows past the end may lie outside the array.
            address = o.arith.select(is_there[half], o.arith.addi(start, o.long(place)), rows.start)
            word = _utils.llvm.load(o.type, _utils.llvm.inttoptr(_utils.llvm.PointerType.get(1), address))
            return _utils.bitcast(o.arith.select(is_there[half], word, o(0)), pair)

        def tile(piece: int) -> Any:
            registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((WARPGROUP_ROWS, width)), dtype=object)
            for index in np.ndindex(registers.shape):
                _, eight, _, _, half, *_ = index
                registers[index] = two(piece, eight, half)
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return tuple(map(tile, range(pieces)))

    call: Any = load
    return tuple((one,) for one in call(source, jnp.int32(first), jnp.int32(limit)))


def load_tile(
    source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool
) -> Float[Array, "64 columns"]:
    """A tile of an array `[L, M]` in device memory, from a row and a column on, 0 past its ends; or its transpose."""
    dtype = jnp.dtype(source.dtype)
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=_TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=result)
    def load(_: Any, source: Any, row: Any, column: Any) -> Any:
        o = Lanes()
        rows = Rows.of(o, source)
        own = o.add(o.times(o.warp, 16), o.row), o.times(o.pair, 2)
        tile_row, tile_column = own[::-1] if transposed else own
        first_row, first_column = o.add(row.registers.item(), tile_row), o.add(column.registers.item(), tile_column)
        start = rows.address(o, first_row, first_column)
        number = _utils.ir.MemRefType(source.type).element_type
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        pair_type = _utils.ir.VectorType.get((2,), number)

        def one(down: int, right: int) -> Any:
            """An element, by how far it is from the thread's first."""
            below = o.below(o.add(first_row, o(down)), o(rows.length))
            inside = o.arith.andi(below, o.below(o.add(first_column, o(right)), o(rows.columns)))
            there = o.arith.select(inside, o.long(down * rows.pitch + right * rows.item_bytes), o.long(0))
            safe = o.arith.select(inside, start, rows.start)
            place = _utils.llvm.inttoptr(_utils.llvm.PointerType.get(1), o.arith.addi(safe, there))
            return o.arith.select(inside, _utils.llvm.load(number, place), _utils.c(0.0, number))

        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            places = [(8 * half, 8 * eight + k) for k in range(2)]
            numbers = [one(*(place[::-1] if transposed else place)) for place in places]
            registers[index] = o.vector.from_elements(pair_type, numbers)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    call: Any = load
    return call(source, jnp.int32(row), jnp.int32(column))


class Rows(NamedTuple):
    """Rows of an array in device memory, `[length, columns]`, that may be apart."""

    start: Any
    length: int
    columns: int
    pitch: int
    """Bytes from one row to the next."""
    item_bytes: int

    @staticmethod
    def of(o: Lanes, ref: Any) -> Rows:
        """Those of a reference."""
        kind = _utils.ir.MemRefType(ref.type)
        (length, columns), ((stride, one), _) = kind.shape, kind.get_strides_and_offset()
        assert one == 1 or columns == 1
        item_bytes = _utils.bitwidth(kind.element_type) // 8
        start = o.device_address(ref)
        return Rows(start, length, columns, stride * item_bytes, item_bytes)

    def address(self, o: Lanes, row: Any, column: Any) -> Any:
        """Where an element is."""
        return o.add(self.start, o.distance(row, self.pitch), o.distance(column, self.item_bytes))


def _instruction(instruction: str) -> None:
    plgpu.inline_mgpu()(lambda _: _utils.inline_ptx(instruction, has_side_effects=True))()
