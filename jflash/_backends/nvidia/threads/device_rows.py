"""Rows of an array in device memory: what threads store of a tile, and load, row by row and within bounds.

Padding may hold anything then, and arrays need no room behind their end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, places, tile

Ref = Any
_utils: Any = mgpu.utils


class ColumnChunk(NamedTuple):
    """Some columns of a tile's `whole` number: those from `first` on, a multiple of 8."""

    first: Any
    whole: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of an array in device memory, `[length, columns]`, that may be apart."""

    start: Any
    length: int
    columns: int
    pitch: int
    """Bytes from one row to the next."""
    item_bytes: int

    @staticmethod
    def of(o: ThreadBuilder, ref: Any) -> Rows:
        """Return the rows of a reference to `[length, columns]`, or to `[tokens, heads, columns]`."""
        return (PackedRows if len(o.shape(ref)) == 3 else Rows).of_array(o, ref)

    @classmethod
    def of_array(cls, o: ThreadBuilder, ref: Any, *more: Any) -> Self:
        """Return the rows of a reference, as for `of`; `more` are the fields of another subclass."""
        (*tokens, length, columns), kind = o.shape(ref), _utils.ir.MemRefType(ref.type)
        (*apart, stride, one), _ = kind.get_strides_and_offset()
        assert one == 1 or columns == 1
        item_bytes = _utils.bitwidth(kind.element_type) // 8
        of_tokens = [number for pitch in apart for number in (length, pitch * item_bytes)]
        rows = math.prod(tokens) * length, columns, stride * item_bytes, item_bytes
        return cls(o.device_address(ref), *rows, *of_tokens, *more)

    def sources(self, o: Any, row: Any, column: Any, steps: Iterable[int], limit: Any) -> list[Source]:
        """Return where a thread finds its chunk of rows that are some steps below its first, from a column on.

        Rows from `limit` on are not there.
        """
        del limit
        address = self.address(o, row, column)
        return [Source(address, step * self.pitch) for step in steps]

    def address(self, o: ThreadBuilder, row: Any, column: Any) -> Any:
        """Return where an element is."""
        return o.add(self.start, o.distance(row, self.pitch), o.distance(column, self.item_bytes))


@dataclasses.dataclass(frozen=True)
class PackedRows(Rows):
    """Rows of `[tokens, heads, columns]`: the heads of one token follow one another."""

    heads: int
    token_pitch: int
    """Bytes from one token to the next."""

    def sources(self, o: Any, row: Any, column: Any, steps: Iterable[int], limit: Any) -> list[Source]:
        del limit
        return [Source(self.address(o, o.add(row, o(step)) if step else row, column), 0) for step in steps]

    def address(self, o: ThreadBuilder, row: Any, column: Any) -> Any:
        token, head = o.arith.divui(row, o(self.heads)), o.arith.remui(row, o(self.heads))
        of_token = o.add(self.start, o.distance(token, self.token_pitch))
        return o.add(of_token, o.distance(head, self.pitch), o.distance(column, self.item_bytes))


class Source(NamedTuple):
    """Where a thread finds its chunk of a row."""

    address: Any
    offset: int
    """Bytes to be added to the address."""
    page: Any = None
    """The page that the row is in, in a paged cache."""


def store_rows(
    values: Float[Array, "64 D"],
    target: Ref,
    first: Any,
    limit: Any,
    columns: ColumnChunk | None = None,
    of_pair: int | None = None,
) -> None:
    """Store rows in `[L, D]`, in the array's dtype, from `first` to below `limit`; but for columns past D, a multiple
    of 8. In `[tokens, heads, D]` the heads of a token are as many rows.

    They may have some of the columns alone, and be one block `of_pair`.
    """
    width = values.shape[1]
    other_columns = 0 if columns is None else columns.whole - width

    def make(o: ThreadBuilder, values: Any, target: Any, first: Any, limit: Any, first_column: Any) -> None:
        rows = Rows.of(o, target)
        below, beside = o.warp_place(width, of_pair)
        row, column = o.add(first, below, o.row), beside if first_column is None else o.add(beside, first_column)
        if rows.item_bytes == 2:
            stored = in_rows(o, o.words_of(values))
        else:
            pair = _utils.ir.VectorType.get((2,), o.type)
            stored = pairs_in_rows(o, [_utils.bitcast(two, pair) for two in values.registers.flat])
        store_in_rows(o, rows, stored, (row, column), limit, other_columns)

    values = values.astype(target.dtype)
    ThreadBuilder.emit(make, values, target, first, limit, None if columns is None else columns.first)


Stored = tuple[int, int, Any, Sequence[Any]]
"""Two neighbouring words: which half of 16 rows they are in; a column, to which that of the thread is to be added; that
of the thread; and they."""


def in_rows(o: ThreadBuilder, words: Sequence[Any]) -> Iterator[Stored]:
    """Yield what threads store of an accumulator's words of 16-bit numbers.

    Of two words of neighbouring eights of columns one is exchanged with the next thread. So a warp stores 32 bytes of
    each row at a time, as much as device memory is written in.
    """
    is_odd, thread_column = o.is_odd, _column_of_two_words(o)
    for place, half in itertools.product(range(len(words) // 4), range(2)):
        two = words[4 * place + half], words[4 * place + 2 + half]
        yield half, 16 * place, thread_column, o.side_by_side(is_odd, two)


def pairs_in_rows(o: ThreadBuilder, pairs: Sequence[Any]) -> Iterator[Stored]:
    """Yield what threads store of an accumulator's pairs of 32-bit numbers: 32 bytes of each row at a time."""
    for (eight, half), pair in zip(places(4 * len(pairs)), pairs, strict=True):
        yield half, 8 * eight, o.first_column, o.numbers(pair)


def store_in_rows(
    o: ThreadBuilder, rows: Rows, stored: Iterable[Stored], first: tuple[Any, Any], limit: Any, other_columns: int
) -> None:
    """Store words in rows below `limit` and columns that there are; `first` are a thread's first row and its warp's
    first column, which is one of `other_columns` at most."""
    row, column = first
    is_there = [o.below(o.add(row, o(8 * half)), limit) for half in range(2)]
    for half, more, thread_column, two in stored:
        place, is_inside = o.add(column, thread_column), is_there[half]
        ((start, offset, _),) = rows.sources(o, row, place, (8 * half,), limit)
        if more + 16 + other_columns > rows.columns:
            is_inside = o.arith.andi(is_inside, o.below(o.add(place, o(more)), o(rows.columns)))
        o.store_in_row(start, offset + more * rows.item_bytes, two, is_inside)


def fetch_rows(source: Ref, first: Any, limit: Any, columns: ColumnChunk, width: int) -> Float[Array, "64 width"]:
    """Return rows of an array that `store_rows` could store them in: from `first` on, some columns.

    Rows from `limit` on, and columns past the array's, a multiple of 8, are 0.
    """

    def make(o: ThreadBuilder, source: Any, first: Any, limit: Any, first_column: Any) -> Any:
        rows, dtype, row = Rows.of(o, source), o.dtype(source), o.add(first, o.first_row)

        def load(half: int, thread_column: Any, more: int) -> Sequence[Any]:
            """Return two words side by side, `more` columns behind a thread's."""
            column, is_there = o.add(first_column, thread_column), o.below(o.add(row, o(8 * half)), limit)
            if columns.whole > rows.columns:
                is_there = o.arith.andi(is_there, o.below(o.add(column, o(more)), o(rows.columns)))
            ((start, offset, _),) = rows.sources(o, row, column, (8 * half,), limit)
            return o.load_in_row(start, offset + more * rows.item_bytes, is_there)

        if rows.item_bytes == 4:
            loaded = (load(half, o.first_column, 8 * eight) for eight, half in places(width))
            pairs = (o.vector_of([_utils.bitcast(word, dtype) for word in two]) for two in loaded)
            return tile((WARPGROUP_ROWS, width), pairs)
        words: dict[tuple[int, int], Any] = {}
        for sixteen, half in itertools.product(range(width // 16), range(2)):
            two = load(half, _column_of_two_words(o), 16 * sixteen)
            words[2 * sixteen, half], words[2 * sixteen + 1, half] = o.side_by_side(o.is_odd, two)
        pair = _utils.ir.VectorType.get((2,), dtype)
        return tile((WARPGROUP_ROWS, width), (_utils.bitcast(words[place], pair) for place in places(width)))

    return ThreadBuilder.emit(
        make, source, first, limit, columns.first, returns=array_type((WARPGROUP_ROWS, width), source.dtype)
    )


def _column_of_two_words(o: ThreadBuilder) -> Any:
    """Return where among 16 columns the two words begin that a thread stores, or loads, side by side."""
    return o.add(o.left(o.arith.andi(o.pair, o(2)), 1), o.arith.select(o.is_odd, o(8), o(0)))


def load_tile(
    source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool
) -> Float[Array, "64 columns"]:
    """Return a tile of an array `[L, M]` in device memory, from a row and column on, or its transpose; 0 past ends."""

    def make(o: ThreadBuilder, source: Any, row: Any, column: Any) -> Any:
        rows, dtype = Rows.of(o, source), o.dtype(source)
        turned = lambda place: place[::-1] if transposed else place
        tile_row, tile_column = turned((o.first_row, o.first_column))
        first_row, first_column = o.add(row, tile_row), o.add(column, tile_column)
        start = rows.address(o, first_row, first_column)

        def number(down: int, right: int) -> Any:
            """Return an element, by how far it is from the thread's first."""
            below = o.below(o.add(first_row, o(down)), o(rows.length))
            inside = o.arith.andi(below, o.below(o.add(first_column, o(right)), o(rows.columns)))
            there = o.arith.select(inside, o.long(down * rows.pitch + right * rows.item_bytes), o.long(0))
            safe = o.arith.select(inside, start, rows.start)
            return o.arith.select(inside, o.load(dtype, o.arith.addi(safe, there)), _utils.c(0.0, dtype))

        pairs = ([number(*turned((8 * half, 8 * eight + k))) for k in range(2)] for eight, half in places(shape[1]))
        return tile(shape, map(o.vector_of, pairs))

    return ThreadBuilder.emit(make, source, row, column, returns=array_type(shape, source.dtype))
