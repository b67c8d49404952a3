"""What a warpgroup does with its tiles: the operations that kernels are written in.

A tile of logits is `[64, columns]` in the layout in which Hopper's matrix unit leaves it. That unit makes products, and
the tensor memory accelerator copies. Pallas' interpreter knows no layouts, no asynchronous products and no copies that
add, so the tests have a plain implementation of every operation that is not made of others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Int, UInt32

from jflash._backends.mosaic_gpu import panels
from jflash._backends.nvidia.threads import (
    builder,
    distances,
    dropout_words,
    leading_piece,
    packed_mask,
    sums,
    sums_by_index,
)

Ref = Any
"""A reference to shared or device memory, or a part of one."""


def along_rows(vector: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each row, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each column, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [1])


def rounded(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest bfloat16 numbers, in what XLA compiles: it may drop a conversion there and back."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


_MOST_COLUMNS = 256
"""N of the matrix unit's instruction."""

_TILE = plgpu.Layout.WGMMA
_ROWS = _TILE.reduce(1)
_COLUMNS = _TILE.reduce(0)
_WARP_UNIFORM = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.bool_), layout=plgpu.Layout.WG_SPLAT(()))


class WarpgroupOps(Protocol):
    """The operations of one warpgroup, as Hopper has them."""

    interpret: Any
    """Pallas' parameters where the kernel runs in its interpreter."""
    margin: int
    """Rows and columns that `reduce_add` needs past the end of an array."""

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        """A tile, or with one axis a vector along a tile's rows, of one value."""
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _TILE if len(shape) == 2 else _ROWS)

    def iota(self, shape: tuple[int, ...], axis: int) -> Int[Array, "rows columns"]:
        """Each element's index along `axis`."""
        # An index is a quotient or remainder by the number of columns: of a power of two the compiler makes one sum.
        whole = shape[0], pl.next_power_of_2(shape[1])
        return lax.slice(plgpu.broadcasted_iota(jnp.int32, whole, axis, layout=_TILE), (0, 0), shape)

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "rows columns"]:
        """Each element's index along `axis`, counted from `first` on."""
        return self.iota(shape, axis) + first

    def distances(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Float[Array, "rows columns"]:
        """Of each row from each column, `first` being that of the tile's corner; or if rows are keys, the reverse."""
        return distances.make(shape, first, keys_first=keys_first)

    def ahead(self, shape: tuple[int, ...], first: Any, *, keys_first: bool) -> Int[Array, "rows columns"]:
        """How far each column is ahead of each row, or if rows are keys the reverse, `first` being that of the tile's
        corner."""
        return distances.make_ahead(shape, jnp.int32(first), keys_first=keys_first)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        """A tile; or a vector along a tile's rows (axis 0) or columns (1)."""
        layout = _TILE if axis is None else (_ROWS, _COLUMNS)[axis]
        return plgpu.load(ref, layout=layout, optimized=False)

    def load_strided(self, ref: Ref, most: int = 4) -> Array:
        """Rows of device memory, a multiple of 128 numbers, to be stored as they are; `most` neighbours to a thread."""
        return plgpu.load(ref, layout=_strided(ref.shape, most), optimized=False)

    def zeros_strided(self, shape: tuple[int, ...]) -> Array:
        """Zeros in the layout of `load_strided`."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _strided(shape))

    def store_strided(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        """Store rows from `first` on, as far as an array in device memory has them and their columns."""
        _inline(_store_strided, plgpu.RefType(), _strided(values.shape), plgpu.Layout.WG_SPLAT(()))(ref, values, first)

    def rounded(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """The nearest bfloat16 numbers."""
        return values.astype(jnp.bfloat16).astype(jnp.float32)

    def leading_piece(
        self, values: Float[Array, "rows columns"]
    ) -> tuple[BFloat16[Array, "rows columns"], Float[Array, "rows columns"]]:
        """A tile's nearest bfloat16 numbers, and the values less those."""
        return leading_piece.take(values)

    def accumulators[Results](self, body: Callable[..., Results], *shapes: tuple[int, int]) -> Results:
        """What `body` returns for an accumulator of zeros for each of `shapes`, which it may set before it adds."""
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def accumulate[Results](
        self, body: Callable[..., Results], *acc: Float[Array, "rows columns"], like: Results
    ) -> tuple[Results, tuple[Float[Array, "rows columns"], ...]]:
        """What `body` returns for accumulators that begin at `acc`, of the types of `like`; and their new values."""
        leaves, tree = jax.tree.flatten(like)

        def store(refs: Any) -> None:
            accumulators, results = refs[: len(acc)], refs[len(acc) :]
            values = jax.tree.leaves(body(*accumulators))
            for ref, value in zip(results, values, strict=True):
                ref[...] = value

        done: Any = pl.run_state(store)((*map(plgpu.ACC.init, acc), *leaves))
        return jax.tree.unflatten(tree, done[len(acc) :]), tuple(done[: len(acc)])

    def mma(self, accumulator: Any, a: Any, b: Any) -> None:
        """Issue accumulator += a @ b; products are made in the order of their issue. More columns than the instruction
        has are two products."""
        if isinstance(b, panels.Panels):
            for operands in panels.products(accumulator, a, b):
                plgpu.wgmma(*operands)
            return
        columns = accumulator.shape[1]
        if columns <= _MOST_COLUMNS:
            plgpu.wgmma(accumulator, a, b)
            return
        for part in (pl.ds(0, _MOST_COLUMNS), pl.ds(_MOST_COLUMNS, columns - _MOST_COLUMNS)):
            plgpu.wgmma(accumulator.at[:, part], a, b.at[:, part])

    def read(self, accumulator: Any, pending: int = 0) -> Float[Array, "rows columns"]:
        """An accumulator, when all products but the last `pending` are made."""
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)

    def wait(self, pending: int) -> None:
        """Wait until all products but the last `pending` are made."""
        plgpu.wgmma_wait(pending)

    def cond(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        """`last`, which issues products and reads them all, or else `nothing`, when all products are made."""

        def wait() -> None:
            plgpu.wgmma_wait(0)
            nothing()

        lax.cond(condition, last, wait)

    def reduce_add(self, destination: Ref, source: Ref) -> None:
        """Issue a copy that adds shared memory to device memory."""
        plgpu.copy_smem_to_gmem(source, destination, reduction_op="add")

    def add_to_sums(self, target: Ref, part: Float[Array, "64 columns"]) -> None:
        """Add 64 rows to `sums` in device memory, `[64, C]`, in any order. Columns from C on are left out."""
        _inline(sums.add, plgpu.RefType(), _TILE)(target, part)

    def store_sums(self, ref: Ref, values: Float[Array, "rows columns"], first: Any) -> None:
        """Store sums that `load_strided` read, rounded to 16 bits, as rows from `first` on. Rows and columns that the
        array in device memory does not have are left out."""
        _inline(sums.store, plgpu.RefType(), _strided(values.shape), plgpu.Layout.WG_SPLAT(()))(ref, values, first)

    def pack_mask(self, mask: Ref, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
        """A packed mask's words for 64 x 64 elements of a mask."""
        return packed_mask.pack(mask, plane, query, key, keys_first)

    def expand_mask(self, words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "rows columns"]:
        """A tile of booleans from its words."""
        return packed_mask.expand(words, shape)

    def dropout_words(
        self, counter: Any, middle: Any, shape: tuple[int, ...], *, keys_first: bool
    ) -> UInt32[Array, "rows half_the_columns"]:
        """A tile's words of dropout, from the counter of its first query and key and the head's word that joins in the
        middle."""
        return dropout_words.words(counter, middle, shape, keys_first=keys_first)

    def drop(
        self,
        p: Float[Array, "rows columns"],
        words: UInt32[Array, "rows half_the_columns"],
        dropped: int,
        *,
        keys_first: bool,
        signed: bool,
    ) -> Float[Array, "rows columns"]:
        """A tile of probabilities without what its words drop or, `signed`, with the sign of that changed."""
        return dropout_words.drop(p, words, dropped, keys_first=keys_first, signed=signed)

    def gather(self, table: Ref, index: Int[Array, "rows columns"]) -> Array:
        """A tile of numbers of a table in device memory, `[numbers]`, by their indices, which must be inside."""
        number = plgpu.ShapeDtypeStruct(index.shape, table.dtype, layout=_TILE)
        read = functools.partial(_gather, is_signed=True if jnp.issubdtype(table.dtype, jnp.integer) else None)
        return _inline(read, plgpu.RefType(), _TILE, returns=number)(table, index)

    def add_by_index(self, table: Ref, index: Int[Array, "rows columns"], values: Float[Array, "rows columns"]) -> None:
        """Add a tile's numbers to those of a table in device memory, `[numbers]`, by their indices, which must be
        inside; in any order."""
        _inline(sums_by_index.add, plgpu.RefType(), _TILE, _TILE)(table, index, values)

    def warp_all_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        """Whether all magnitudes that a thread's warp holds of a tile are below a limit; warps may differ."""
        return _inline(functools.partial(_all_below, limit=limit), _TILE, returns=_WARP_UNIFORM)(tile)

    def warp_all(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        """Whether a condition holds for all rows of a thread's warp; warps may differ."""
        return _inline(_all_rows, _ROWS, returns=_WARP_UNIFORM)(condition)

    def opaque_zero(self, step: Any) -> Int[Array, ""]:
        """`pipeline.opaque_zero` for a loop of which the compiler knows the warpgroup and may know all steps."""
        scalar = plgpu.Layout.WG_SPLAT(())
        returns = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar)
        return _inline(_highest_bits, scalar, returns=returns)(step)

    def prevent_tail_merge(self) -> None:
        """Keep the compiler from merging the equal ends of two branches, at the end of one of them."""
        _inline(lambda _: _utils.inline_ptx("", has_side_effects=True))()

    def take_turn(self, warpgroup: Any) -> None:
        """Wait until the turn has been passed to this warpgroup, as often as it waited before and once more."""
        _inline(functools.partial(_turn, action="sync"), plgpu.Layout.WG_SPLAT(()))(jnp.int32(warpgroup))

    def pass_turn(self, warpgroup: Any) -> None:
        """Pass the turn to a warpgroup: it has to take it before it is passed to it again."""
        _inline(functools.partial(_turn, action="arrive"), plgpu.Layout.WG_SPLAT(()))(jnp.int32(warpgroup))

    def take_ticket(self, counter: Ref, ticket: Ref) -> None:
        """Increment an integer in device memory, and store its old value in shared memory."""
        _inline(_take_ticket, plgpu.RefType(), plgpu.RefType())(counter, ticket)

    def take_number(self, counter: Ref, number: Ref) -> Int[Array, ""]:
        """Publish all that this warpgroup did, increment an integer in device memory, and see what was done before.

        The integer's old value, which passes through a number of shared memory that is this warpgroup's.
        """
        _inline(_take_number, plgpu.RefType(), plgpu.RefType())(counter, number)
        return number[0]

    def signal(self, counter: Ref) -> None:
        """Increment an integer in device memory, and with it publish all that this warpgroup did."""
        _inline(_signal, plgpu.RefType())(counter)

    def wait_for(self, counter: Ref, value: int) -> None:
        """Wait until an integer in device memory has a value, and see what was done before it had."""
        _inline(functools.partial(_wait_for, value=value), plgpu.RefType())(counter)


class _Hopper(WarpgroupOps):
    interpret = None
    margin = 0


HOPPER: WarpgroupOps = _Hopper()


def _inline(instructions: Callable[..., Any], *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    return plgpu.inline_mgpu(arg_types=arguments, return_type=returns)(instructions)


def _strided(shape: tuple[int, ...], most: int = 4) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(most, math.prod(shape) // 128))


# Instructions that Pallas does not have, for `plgpu.inline_mgpu`.

_utils: Any = mgpu.utils


def _gather(_: Any, table: Any, index: Any, is_signed: bool | None) -> Any:
    arith, ir, vector = _utils.arith, _utils.ir, _utils.vector
    pair_type = ir.VectorType.get((2,), ir.MemRefType(table.type).element_type)

    def number(pair: Any, at: int) -> Any:
        place = vector.extract(pair, [], ir.DenseI64ArrayAttr.get([at]))
        return _utils.memref.load(table, [arith.index_cast(ir.IndexType.get(), place)])

    registers = np.empty_like(index.registers)
    for place in np.ndindex(registers.shape):
        registers[place] = vector.from_elements(pair_type, [number(index.registers[place], at) for at in range(2)])
    return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=is_signed)


def _store_strided(_: Any, target: Any, values: Any, first: Any) -> None:
    arith, ir = _utils.arith, _utils.ir
    index = ir.IndexType.get()
    ends = [mgpu.c(size, index) for size in ir.MemRefType(target.type).shape]
    columns = mgpu.c(values.shape[1], index)
    first = arith.index_cast(index, first.registers.item())
    for place, numbers in zip(values.layout.linear_thread_idxs(), values.registers.flat, strict=True):
        at = [arith.addi(first, arith.divui(place, columns)), arith.remui(place, columns)]
        is_there = [arith.cmpi(arith.CmpIPredicate.slt, *pair) for pair in zip(at, ends, strict=True)]
        with mgpu.when(arith.andi(*is_there)):
            _utils.vector.store(numbers, target, at)


def _all_below(_: Any, tile: Any, limit: float) -> Any:
    arith, vector = _utils.arith, _utils.vector
    integer, number = _utils.ir.IntegerType.get_signless(32), _utils.ir.F32Type.get()
    element = lambda pair, at: vector.extract(pair, [], _utils.ir.DenseI64ArrayAttr.get([at]))
    # Without the sign, which is the highest bit.
    bits = lambda x: arith.andi(arith.bitcast(integer, x), _utils.c(0x7FFFFFFF, integer))
    sizes = [arith.bitcast(number, bits(element(pair, at))) for pair in tile.registers.flat for at in range(2)]
    # NaN is the largest, and below nothing.
    largest = builder.as_tree(arith.maximumf, sizes)
    return _vote_all(arith.cmpf(arith.CmpFPredicate.OLT, largest, _utils.c(limit, number)))


def _all_rows(_: Any, condition: Any) -> Any:
    first = _utils.ir.DenseI64ArrayAttr.get([0])
    own = [_utils.vector.extract(row, [], first) for row in condition.registers.flat]
    return _vote_all(functools.reduce(_utils.arith.andi, own))


def _vote_all(own: Any) -> Any:
    every = _utils.c(0xFFFFFFFF, _utils.ir.IntegerType.get_signless(32))
    return mgpu.FragmentedArray.splat(_utils.nvvm.vote_sync(every, own, "all"), (), is_signed=False)


def _highest_bits(_: Any, step: Any) -> Any:
    integer = _utils.ir.IntegerType.get_signless(32)
    bits = _utils.inline_ptx("shr.u32 $0, $1, 30;", step.registers.item(), result_types=integer)
    return mgpu.FragmentedArray.splat(bits, (), is_signed=True)


def _turn(_: Any, warpgroup: Any, action: str) -> None:
    # Named barriers: Mosaic GPU has one for each warpgroup, from 1 on, and there are 16.
    barrier = _utils.arith.addi(warpgroup.registers.item(), _utils.c(8, _utils.ir.IntegerType.get_signless(32)))
    # The threads of two warpgroups: who waits, and who passes.
    _utils.inline_ptx(f"barrier.cta.{action}.aligned $0, 256;", barrier, has_side_effects=True)


def _signal(_: Any, counter: Any) -> None:
    mgpu.warpgroup_barrier()
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        add = "red.release.gpu.global.add.s32 [$0], 1;"
        _utils.inline_ptx(add, _utils.memref_ptr(counter), has_side_effects=True)


def _wait_for(_: Any, counter: Any, value: int) -> None:
    loop = """{ .reg .pred other; .reg .b32 now;
            again: ld.acquire.gpu.global.s32 now, [$0]; setp.ne.s32 other, now, $1; @other bra again; }"""
    wanted = mgpu.c(value, _utils.ir.IntegerType.get_signless(32))
    _utils.inline_ptx(loop, _utils.memref_ptr(counter), wanted, has_side_effects=True)
    # What threads wrote themselves comes before what copies do now.
    _utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


def _take_number(_: Any, counter: Any, number: Any) -> None:
    mgpu.warpgroup_barrier()
    _take_ticket(_, counter, number, order="acq_rel")
    mgpu.warpgroup_barrier()


def _take_ticket(_: Any, counter: Any, ticket: Any, order: str = "relaxed") -> None:
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        integer = _utils.ir.IntegerType.get_signless(32)
        add = f"atom.{order}.gpu.global.add.s32 $0, [$1], 1;"
        old = _utils.inline_ptx(add, _utils.memref_ptr(counter), result_types=integer, has_side_effects=True)
        _utils.memref.store(old, ticket, [_utils.c(0, _utils.ir.IndexType.get())])
