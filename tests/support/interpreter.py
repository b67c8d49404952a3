"""`WarpgroupOps` on any machine: plain array code for Pallas' interpreter, which can find races."""

from __future__ import annotations

import dataclasses
import functools
import math
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

from jflash._backends.mosaic_gpu.hardware import panels, sums
from jflash._backends.mosaic_gpu.hardware.warpgroup import Ref, WarpgroupOps, rounded
from jflash._backends.mosaic_gpu_mma.hardware import MmaOps, Operand, Part, Tiles
from jflash._backends.mosaic_gpu_mma.hardware.products import STEP, STEPS_OF_PIECES


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


@dataclasses.dataclass(frozen=True)
class Interpreter(WarpgroupOps):
    """The operations of one warpgroup; it needs a thread for every warpgroup of a CTA.

    A product is made as late as the hardware may make it: not before something waits for it.
    """

    interpret: plgpu.InterpretGPUParams
    pending: list[tuple[Any, Any, Ref]] = dataclasses.field(default_factory=list, compare=False)
    """Products that were issued and not waited for."""
    margin = 256
    """`reduce_add` reads what it adds to, and reads whole tiles."""

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        return jnp.full(shape, value, jnp.float32)

    def iota(self, shape: tuple[int, ...], axis: int) -> Int[Array, "rows columns"]:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    # Also where a family of kernels has its own.
    indices = WarpgroupOps.indices

    def distances(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Float[Array, "rows columns"]:
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        return (first + (column - row if keys_first else row - column)).astype(jnp.float32)

    def ahead(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Int[Array, "rows columns"]:
        row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        return first + (row - column if keys_first else column - row)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        return ref[...]

    def load_strided(self, ref: Ref, most: int = 4) -> Array:
        return ref[...]

    def zeros_strided(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, jnp.float32)

    def store_strided(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        for row in range(len(values)):

            @pl.when(first + row < ref.shape[0])
            def _(row: int = row) -> None:
                ref[pl.ds(first + row, 1)] = values[row : row + 1, : ref.shape[1]]

    def rounded(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        return rounded(values)

    def leading_piece(self, values: Float[Array, "rows columns"]) -> tuple[Array, Array]:
        piece = rounded(values)
        return piece.astype(jnp.bfloat16), values - piece

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

    def add_to_sums(self, target: Ref, part: Float[Array, "64 columns"]) -> None:
        target[...] = target[...] + sums.from_rows(part[:, : target.shape[1]])

    def store_sums(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        self.store_strided(ref, sums.as_rows(values), first)

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

    def clear(self, table: Ref) -> None:
        table[...] = jnp.zeros(table.shape, table.dtype)

    def add_by_index(self, table: Ref, index: Int[Array, "rows columns"], values: Float[Array, "rows columns"]) -> None:
        table[...] = table[...].at[index].add(values, mode="promise_in_bounds")

    def warp_all_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        return jnp.all(jnp.abs(tile) < limit)

    def warp_all(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        return jnp.all(condition)

    def opaque_zero(self, step: Any) -> Int[Array, ""]:
        return lax.shift_right_logical(step, 30)

    def take_turn(self, warpgroup: Any) -> None:
        """No turns: no result depends on them."""

    def pass_turn(self, warpgroup: Any) -> None:
        """Likewise."""

    def prevent_tail_merge(self) -> None:
        """Nothing."""

    def take_ticket(self, counter: Ref, ticket: Ref) -> None:
        """CTAs run one after the other in the order of their indices: a counter would be a race to the interpreter."""
        index = 0
        for axis in ("wave", "block", "item"):
            index = index * lax.axis_size(axis) + lax.axis_index(axis)
        ticket[0] = index

    def take_number(self, counter: Ref, number: Ref) -> Array:
        """Likewise a block's index."""
        return lax.axis_index("block")

    def signal(self, counter: Ref) -> None:
        """Nothing: CTAs run one after the other, so none has to wait."""

    def wait_for(self, counter: Ref, value: int) -> None:
        """Nothing."""


def _pieces(ref: Ref) -> Array:
    """An operand's pieces, `[pieces, rows, columns]`; or itself as one."""
    return ref[...].reshape(-1, *ref.shape[-2:])


def _add_products(acc: Array, left: Array, right: Array, order: Sequence[tuple[int, int]]) -> Array:
    """Of pieces, as the kernels make them: those of a few steps of K are one sum of the matrix unit's."""
    steps, depth = STEPS_OF_PIECES, matrix_unit.DEPTH
    missing = -left.shape[2] % (steps * depth)
    a, b = (jnp.stack(chosen) for chosen in zip(*((left[i], right[j]) for i, j in order), strict=True))
    a = jnp.pad(a, [(0, 0), (0, 0), (0, missing)]).reshape(len(order), a.shape[1], -1, steps, depth)
    b = jnp.pad(b, [(0, 0), (0, missing), (0, 0)]).reshape(len(order), -1, steps, depth, b.shape[2])
    # Each sum's steps, in their order.
    a = a.transpose(2, 0, 3, 1, 4).reshape(a.shape[2], -1, a.shape[1], depth)
    b = b.swapaxes(0, 1).reshape(b.shape[1], -1, depth, b.shape[4])
    nothing = jnp.zeros((a.shape[2], b.shape[3]), jnp.float32)

    def add_step(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        return matrix_unit.add(total, jnp.dot(*pair, preferred_element_type=jnp.float32)), None

    return lax.scan(lambda acc, pairs: (acc + lax.scan(add_step, nothing, pairs)[0], None), acc, (a, b))[0]


def _joined(pair: Tiles) -> Float[Array, "64 columns"]:
    """The rows of which a pair of blocks consists."""
    return jnp.stack(pair).reshape(2, 2, 2, 16, -1).transpose(1, 0, 3, 2, 4).reshape(64, -1)


def _pair(rows: Float[Array, "64 columns"]) -> Tiles:
    """The pair of blocks that has the rows."""
    # Rows: two warps', block, 16. Columns: which of the two.
    return tuple(rows.reshape(2, 2, 16, 2, -1).transpose(1, 0, 3, 2, 4).reshape(2, 64, -1))


def _together(pair: Tiles) -> Float[Array, "64 columns"]:
    """The rows of A that a pair of blocks consists of, which two warps each have."""
    return _joined(pair)[:, : pair[0].shape[1]]


def _of_steps(left: Array, right: Array, steps: Sequence[int] | None) -> tuple[Array, Array]:
    """Of operands `[..., rows, K]` and `[..., K, columns]` what belongs to steps in K."""
    if steps is None:
        return left, right
    some = slice(STEP * steps[0], STEP * (steps[-1] + 1))
    return left[..., some], right[..., some, :]


def _arrive_and_wait(barrier: Ref) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


class MmaInterpreter(Interpreter, MmaOps):
    """The operations of a warpgroup that is a CTA. Copies arrive at once: a wait that is missing does not show."""

    def add_product(
        self,
        acc: Tiles,
        a: Operand,
        b: Ref,
        order: Sequence[tuple[int, int]],
        *,
        transposed: bool,
        first_row: Any = None,
        a_transposed: bool = False,
        steps: Sequence[int] | None = None,
        first_column: int = 0,
    ) -> Tiles:
        left = jnp.stack(list(map(jnp.concatenate, a))) if isinstance(a, tuple) else _pieces(a)
        left, right = left.mT if a_transposed else left, _pieces(b)
        if first_row is not None:
            right = lax.dynamic_slice_in_dim(right, first_row, acc[0].shape[1] if transposed else left.shape[2], axis=1)
        right = right.mT if transposed else right
        left, right = _of_steps(left, right, steps)
        right = right[..., first_column : first_column + acc[0].shape[1]]
        total = jnp.concatenate(acc)
        if len(order) == 1:
            # What the matrix unit cuts off from a sum is less than what 16 bits cut off from an operand.
            total += jnp.dot(left[0], right[0], preferred_element_type=jnp.float32)
        else:
            total = _add_products(total, left, right, order)
        return tuple(jnp.split(total, len(acc)))

    def add_pair_product(
        self,
        acc: Tiles,
        a: Operand,
        b: Ref,
        *,
        a_transposed: bool = False,
        steps: Sequence[int] | None = None,
        first_column: int = 0,
    ) -> Tiles:
        left = _together(a[0]) if isinstance(a, tuple) else a[...]
        left, right = _of_steps(left.T if a_transposed else left, b[...], steps)
        halves = right.reshape(len(right), 2, -1)[..., first_column : first_column + acc[0].shape[1]]
        made = jnp.dot(left, halves.reshape(len(right), -1), preferred_element_type=jnp.float32)
        return _pair(_joined(acc) + made)

    def load_rows(
        self, ref: Ref, *, columns: int | None = None, transposed: bool = False, paired: bool = False
    ) -> tuple[Tiles, ...]:
        pieces = _pieces(ref)
        pieces = (pieces.mT if transposed else pieces)[..., :columns]
        if paired:
            # Each warp of two that share rows has all of their columns.
            return tuple(_pair(jnp.concatenate([piece, piece], axis=1)) for piece in pieces)
        return tuple(tuple(jnp.split(piece, len(piece) // 64)) for piece in pieces)

    def scaled_pair(self, pair: Tiles, factors: Ref) -> Tiles:
        return _pair(_joined(pair) * factors[...][:, None])

    def copy_rows(self, source: Ref, target: Ref, first: Any, limit: Any, part: Part | None = None) -> None:
        rows, number, width = first + jnp.arange(target.shape[-2]), math.prod(target.shape[:-2]), target.shape[-1]
        found = jnp.where((rows < limit)[:, None], source[...].at[rows].get(mode="clip"), 0)
        pieces = found.reshape(len(rows), number, -1).swapaxes(0, 1)
        whole, column = (width, 0) if part is None else (part.whole, part.first)
        pieces = jnp.pad(pieces, [(0, 0), (0, 0), (0, max(whole - pieces.shape[2], 0))])
        target[...] = lax.dynamic_slice_in_dim(pieces, column, width, axis=2).reshape(target.shape)

    def copy_numbers(self, source: Ref, target: Ref, first: Any) -> None:
        target[...] = source[pl.ds(first, target.shape[0])]

    def commit(self) -> None:
        """Nothing."""

    def wait(self, pending: int = 0, *, warpgroups: int = 1) -> None:
        self.meet(warpgroups)

    def meet(self, warpgroups: int) -> None:
        if warpgroups > 1:
            barrier = plgpu.Barrier(num_arrivals=warpgroups)
            pl.run_scoped(_arrive_and_wait, barrier, collective_axes="warpgroup")

    def store_tile(self, values: Tiles, target: Ref, first_column: Any) -> None:
        target[:, pl.ds(first_column, values[0].shape[1])] = jnp.concatenate(values)

    def store_rows(
        self, values: Float[Array, "64 D"], target: Ref, first: Any, limit: Any, part: Part | None = None
    ) -> None:
        (height, width), (length, columns) = values.shape, target.shape

        def store(column: int) -> None:
            # These rows and columns alone: other warpgroups store others. At the array's end, eight at a time.
            def some(number: int, size: int) -> None:
                start = jnp.minimum(first + number, length - size)
                own = target.at[pl.ds(start, size), pl.ds(column, min(width, columns - column))]
                rows = first + number + jnp.arange(size)
                rows = jnp.where(rows < limit, rows - start, size)
                given = values[number : number + size, : own.shape[1]].astype(target.dtype)
                own[...] = own[...].at[rows].set(given, mode="drop")

            is_inside = first + height <= length
            if height <= length:
                pl.when(is_inside)(functools.partial(some, 0, height))
            for number in range(0, height, 8):
                is_there = ~is_inside & (first + number < limit)
                pl.when(is_there)(functools.partial(some, number, min(8, length)))

        for column in range(0, columns, width):
            if part is None:
                assert column == 0
                store(column)
            else:
                pl.when(part.first == column)(functools.partial(store, column))

    def store_pair(self, pair: Tiles, target: Ref, first: Any, limit: Any, part: Part | None = None) -> None:
        self.store_rows(_joined(pair), target, first, limit, part)

    def add_pair(self, pair: Tiles, target: Ref, row: Any, column: Any, together: int, half: int) -> None:
        for number, values in enumerate(jnp.split(_joined(pair), 2, axis=1)):
            self.add_rows(values, target, row, column + number * half, together)

    def add_rows(self, values: Float[Array, "64 columns"], target: Ref, row: Any, column: Any, together: int) -> None:
        groups, units = values.shape[0] // 8, values.shape[1] // 16
        if together == 4:
            numbers = sums.from_rows(values)
        else:
            # Group, row; unit, eight, pair, neighbour.
            numbers = values.reshape(groups, 8, units, 2, 4, 2).transpose(0, 2, 3, 5, 1, 4)
        own = target.at[pl.ds(lax.div(row, 8), groups), pl.ds(lax.div(column, 16), units)]
        own[...] = own[...] + numbers.reshape(groups, units, 128)

    def load_sums(self, source: Ref, row: Any, columns: int, together: int) -> Float[Array, "64 columns"]:
        found = source[pl.ds(lax.div(row, 8), 8)]
        if together == 4:
            return sums.as_rows(found.reshape(64, columns))
        return found.reshape(8, columns // 16, 2, 2, 8, 4).transpose(0, 4, 1, 2, 5, 3).reshape(64, columns)

    def load_tile(self, source: Ref, row: Any, column: Any, shape: tuple[int, int], *, transposed: bool) -> Array:
        rows, columns = (
            first + jnp.arange(size)
            for first, size in zip((row, column), shape[::-1] if transposed else shape, strict=True)
        )
        found = source[...].at[rows].get(mode="fill", fill_value=0).at[:, columns].get(mode="fill", fill_value=0)
        return found.T if transposed else found
