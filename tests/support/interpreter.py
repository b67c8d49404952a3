"""`Ops` and `WarpgroupOps` on any machine: plain array code for Pallas' interpreter, which can find races."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import dropped_words
import jax
import jax.numpy as jnp
import matrix_unit
import packed_masks
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from jflash._backends.mosaic_gpu import panels
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia.launch import cta_index, grid_size
from jflash._backends.nvidia.ops import Ops, Ref, rounded
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile import operand_pieces


@dataclasses.dataclass
class Accumulator:
    """The interpreter's accumulator of products."""

    value: Float[Array, "rows columns"]

    def __setitem__(self, whole: Any, value: Float[Array, "rows columns"]) -> None:
        assert whole is ...
        self.value = value

    @property
    def at(self) -> AccumulatorColumns:
        return AccumulatorColumns(self)


@dataclasses.dataclass
class AccumulatorColumns:
    """Some columns of an accumulator."""

    whole: Accumulator
    columns: slice = dataclasses.field(default_factory=lambda: slice(None))

    def __getitem__(self, index: tuple[slice, Any]) -> AccumulatorColumns:
        every, part = index
        assert every == slice(None)
        return AccumulatorColumns(self.whole, slice(part.start, part.start + part.size))

    @property
    def value(self) -> Float[Array, "rows columns"]:
        return self.whole.value[:, self.columns]

    @value.setter
    def value(self, value: Float[Array, "rows columns"]) -> None:
        self.whole.value = self.whole.value.at[:, self.columns].set(value)


def sums_of_rows(rows: Float[Array, "L C"]) -> Float[Array, "L C"]:
    """Return rows in the order of sums whose instructions add four numbers: what `sums.as_rows` takes back."""
    length, columns = rows.shape
    numbers = rows.reshape(length // sums.ROWS, sums.ROWS, columns // sums.COLUMNS, 2, 4, 2)
    return numbers.swapaxes(-5, -4).swapaxes(-3, -2).reshape(rows.shape)


def _arrive_and_wait(barrier: Ref) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@dataclasses.dataclass(frozen=True)
class CommonInterpreter(Ops):
    """The operations of one warpgroup that both families have; it needs a thread for every warpgroup of a CTA."""

    interpret: plgpu.InterpretGPUParams

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        return jnp.full(shape, value, jnp.float32)

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "rows columns"]:
        return lax.broadcasted_iota(jnp.int32, shape, axis) + first

    def store_rows(
        self, values: Float[Array, "64 D"], target: Ref, first: Any, limit: Any, columns: ColumnChunk | None = None
    ) -> None:
        if len(target.shape) == 3:
            self._store_packed_rows(values, target, first, limit, columns)
            return
        (height, width), (length, dim), first = values.shape, target.shape, jnp.asarray(first)
        assert not isinstance(limit, int) or limit <= length
        count = jnp.maximum(jnp.minimum(limit, length) - first, 0)
        is_whole = count >= height

        def store(column: int) -> None:
            # These rows and columns alone: others store the others. At the end eight rows at a time, then one.
            own = pl.ds(column, min(width, dim - column))
            given = values[:, : own.size].astype(target.dtype)

            def some(number: Any, size: int) -> None:
                target.at[pl.ds(first + number, size), own][...] = lax.dynamic_slice_in_dim(given, number, size)

            if height <= length:
                pl.when(is_whole)(functools.partial(some, 0, height))
            for number in range(0, height, 8):
                if number + 8 <= length:
                    pl.when(~is_whole & (number + 8 <= count))(functools.partial(some, number, 8))
            rest = jnp.where(is_whole, height, count)
            lax.fori_loop(rest // 8 * 8, rest, lambda number, _: some(number, 1), None)

        for column in range(0, dim, width):
            if columns is None:
                assert column == 0
                store(column)
            else:
                pl.when(columns.first == column)(functools.partial(store, column))

    def _store_packed_rows(
        self, values: Float[Array, "64 D"], target: Ref, first: Any, limit: Any, columns: ColumnChunk | None
    ) -> None:
        (height, whole), (_, heads, dim) = values.shape, target.shape

        def store(column: int) -> None:
            width = min(whole, dim - column)
            given = values[:, :width].astype(target.dtype)

            def one(number: Any, carry: None) -> None:
                row = first + number
                own = lax.div(row, heads), lax.rem(row, heads), pl.ds(column, width)

                @pl.when(row < limit)
                def _() -> None:
                    target[own] = given[number]

            lax.fori_loop(0, height, one, None)

        for column in range(0, dim, whole):
            pl.when(columns is None or columns.first == column)(functools.partial(store, column))

    def fetch_rows(
        self, source: Ref, first: Any, limit: Any, columns: ColumnChunk, width: int
    ) -> Float[Array, "64 width"]:
        rows, column = first + jnp.arange(64), columns.first + jnp.arange(width)
        found = source[...].reshape(-1, source.shape[-1]).at[rows].get(mode="fill", fill_value=0)
        found = found.at[:, column].get(mode="fill", fill_value=0)
        return jnp.where((rows < limit)[:, None], found, 0)

    def load_tile(self, source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool) -> Array:
        rows, columns = (
            first + jnp.arange(size)
            for first, size in zip((row, column), shape[::-1] if transposed else shape, strict=True)
        )
        found = source[...].at[rows].get(mode="fill", fill_value=0).at[:, columns].get(mode="fill", fill_value=0)
        return found.T if transposed else found

    def distances(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Float[Array, "rows columns"]:
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        return (first + (column - row if keys_first else row - column)).astype(jnp.float32)

    def key_minus_query(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Int[Array, "rows columns"]:
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        return first + (row - column if keys_first else column - row)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        return ref[...]

    def load_strided(self, ref: Ref, most: int = 4) -> Array:
        return ref[...]

    def leading_piece(self, values: Float[Array, "rows columns"]) -> tuple[Array, Array]:
        piece = rounded(values)
        return piece.astype(jnp.bfloat16), values - piece

    def partial_sums(self, tile: Float[Array, "rows columns"], parts: int) -> Float[Array, "rows parts"]:
        return tile.reshape(len(tile), -1, parts).sum(axis=1)

    def pack_mask(self, mask: Ref, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
        return packed_masks.pack(mask[...], plane, query, key, keys_first)

    def expand_mask(self, words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "rows columns"]:
        return packed_masks.expand(words, shape)

    def dropout_words(
        self, counter: Any, middle: Any, shape: tuple[int, ...], *, keys_first: bool
    ) -> UInt32[Array, "rows half_the_columns"]:
        return dropped_words.words(counter, middle, shape, keys_first=keys_first)

    def drop(
        self,
        p: Float[Array, "rows columns"],
        words: UInt32[Array, "rows half_the_columns"],
        dropped: int,
        *,
        keys_first: bool,
        signed: bool,
    ) -> Float[Array, "rows columns"]:
        return dropped_words.drop(p, words, dropped, keys_first=keys_first, signed=signed)

    def gather(self, table: Ref, index: Int[Array, "rows columns"]) -> Array:
        return table[...][index]

    def meet(self, warpgroups: int = 1) -> None:
        if warpgroups > 1:
            barrier = plgpu.Barrier(num_arrivals=warpgroups)
            pl.run_scoped(_arrive_and_wait, barrier, collective_axes="warpgroup")

    def threads(self) -> Int[Array, "128"]:
        return jnp.arange(128, dtype=jnp.int32)

    def gather_by_thread(self, table: Ref, index: Int[Array, "128"]) -> Int[Array, "128"]:
        return table[...][index]

    def scatter_by_thread(
        self, table: Ref, row: Int[Array, "128"], condition: Bool[Array, "128"], *numbers: Int[Array, "128"] | int
    ) -> None:
        stacked = jnp.stack([jnp.broadcast_to(jnp.int32(number), row.shape) for number in numbers], axis=1)

        def store(thread: Any, carry: None) -> None:
            @pl.when(condition[thread])
            def _() -> None:
                table[row[thread]] = stacked[thread]

        lax.fori_loop(0, len(row), store, None)

    def zero_hidden_rows(self, rows: Ref, lse: Ref, first: Any) -> None:
        size = min(128, rows.shape[0])
        # At the array's end the log-sum-exps before `first` are read too; their rows are another block's.
        start = jnp.minimum(first, rows.shape[0] - size)
        hidden = (start + jnp.arange(size) >= first) & (lse[pl.ds(start, size)] == -jnp.inf)

        def zero(row: Any, carry: None) -> None:
            @pl.when(hidden[row])
            def _() -> None:
                rows[pl.ds(start + row, 1)] = jnp.zeros((1, rows.shape[1]), rows.dtype)

        lax.fori_loop(0, size, zero, None)

    def add_by_index(self, table: Ref, index: Int[Array, "rows columns"], values: Float[Array, "rows columns"]) -> None:
        table[...] = table[...].at[index].add(values, mode="promise_in_bounds")

    def warp_all_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        return jnp.all(jnp.abs(tile) < limit)

    def warp_all(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        return jnp.all(condition)

    def opaque_zero(self, step: Any) -> Int[Array, ""]:
        return lax.shift_right_logical(step, 30)

    def prevent_tail_merge(self) -> None:
        """Nothing."""


@dataclasses.dataclass(frozen=True)
class Interpreter(CommonInterpreter, WarpgroupOps):
    """The operations of one warpgroup on Hopper.

    A product is made as late as the hardware may make it: not before something waits for it.
    """

    pending: list[tuple[Any, Any, Ref]] = dataclasses.field(default_factory=list, compare=False)
    """Products that were issued and not waited for."""
    margin = 256
    """`reduce_add` reads what it adds to, and reads whole tiles."""

    def load_eights(self, ref: Ref) -> Array:
        assert ref.shape[1] in (16, 32, 64, 128)
        assert ref.shape[0] * ref.shape[1] % 1024 == 0
        return ref[...]

    def times_eights(self, values: Float[Array, "rows columns"], factor: Any) -> Float[Array, "rows columns"]:
        return (values.astype(jnp.float32) * factor).astype(jnp.bfloat16)

    def zeros_strided(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, jnp.float32)

    def store_strided(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        for row in range(len(values)):

            @pl.when(first + row < ref.shape[0])
            def _(row: int = row) -> None:
                ref[pl.ds(first + row, 1)] = values[row : row + 1, : ref.shape[1]]

    def accumulators(self, body: Any, *shapes: tuple[int, int]) -> Any:
        return body(*(Accumulator(jnp.zeros(shape, jnp.float32)) for shape in shapes))

    def accumulate(self, body: Any, *acc: Float[Array, "rows columns"], like: Any) -> Any:
        accumulators = [Accumulator(array) for array in acc]
        results = body(*accumulators)
        self._finish(0)
        return results, tuple(accumulator.value for accumulator in accumulators)

    def mma(self, accumulator: Accumulator, a: Any, b: Any) -> None:
        in_panels = isinstance(b, panels.Panels)
        self.pending.extend(panels.products(accumulator, a, b) if in_panels else [(accumulator, a, b)])

    def read(self, accumulator: Accumulator, pending: int = 0) -> Float[Array, "rows columns"]:
        self._finish(pending)
        return accumulator.value

    def wait(self, pending: int) -> None:
        self._finish(pending)

    def cond(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        self._finish(0)
        lax.cond(condition, last, nothing)

    def _finish(self, pending: int) -> None:
        while len(self.pending) > pending:
            accumulator, a, b = self.pending.pop(0)
            left, right = a if isinstance(a, jax.Array) else a[...], b[...]
            plgpu.commit_smem()
            accumulator.value = matrix_unit.add_product(accumulator.value, left, right)

    def reduce_add(self, destination: Ref, source: Ref) -> None:
        destination[...] = destination[...] + source[...]

    def piece_columns(self, numbers: Sequence[Float[Array, "rows"]], columns: int) -> Float[Array, "rows columns"]:
        pieces = [piece for each in numbers for piece in operand_pieces.split_numbers(each)]
        stored = jnp.stack(pieces, axis=1).astype(jnp.bfloat16)
        return jnp.pad(stored, [(0, 0), (0, columns - len(pieces))])

    def add_to_sums(self, target: Ref, rows: Float[Array, "64 columns"]) -> None:
        target[...] = target[...] + sums_of_rows(rows[:, : target.shape[1]])

    def store_sums(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        self.store_strided(ref, sums.as_rows(values), first)

    def take_turn(self, warpgroup: Any) -> None:
        """No turns: no result depends on them."""

    def pass_turn(self, warpgroup: Any) -> None:
        """No turns: no result depends on them."""

    def take_ticket(self, counter: Ref, ticket: Ref) -> None:
        """CTAs run one after the other in the order of their indices: a counter would be a race to the interpreter."""
        index = 0
        for axis in ("wave", "block", "item"):
            index = index * grid_size(axis) + cta_index(axis)
        ticket[0] = index

    def take_number(self, counter: Ref, number: Ref) -> Array:
        """Return a block's index: blocks run one after the other in its order."""
        return cta_index("block")

    def signal(self, counter: Ref) -> None:
        """Nothing: CTAs run one after the other, so none has to wait."""

    def count_and_wait(self, counter: Ref, before: Ref, least: Int[Array, ""]) -> None:
        """Nothing."""

    def wait_for(self, counter: Ref, value: int) -> None:
        """Nothing."""
