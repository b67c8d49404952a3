"""What a warpgroup does with its tiles, on the hardware and in Pallas' interpreter.

A tile of logits is `[64, columns]` in the layout in which Hopper's matrix unit leaves it. The interpreter knows no
layouts, and neither products in the background nor copies that add: `Interpreter` does the same in the plain way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jflash._backends.mosaic_gpu import mask_bits

Ref = Any
"""A reference to shared or device memory, or a part of one."""

_TILE = plgpu.Layout.WGMMA
_ROWS = _TILE.reduce(1)
_COLUMNS = _TILE.reduce(0)
_ANSWER = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.bool_), layout=plgpu.Layout.WG_SPLAT(()))
"""One truth value for a warp's threads."""


def along_rows(vector: Float[Array, "rows"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each row, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Float[Array, "columns"], shape: tuple[int, ...]) -> Float[Array, "rows columns"]:
    """One value for each column, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [1])


def rounded(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest numbers that bfloat16 has, in what XLA compiles: a conversion and back it may leave out."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Tiles in registers, products by the matrix unit, copies by the tensor memory accelerator."""

    processors: int | None = None
    """Multiprocessors of the device; `None`: nobody knows."""
    interpret: Any = None
    margin = 0

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        """A tile, or with one axis a vector along a tile's rows, of one value."""
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _TILE if len(shape) == 2 else _ROWS)

    def index(self, shape: tuple[int, int], axis: int) -> Int[Array, "rows columns"]:
        """Each element's index along `axis`."""
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        """A tile; or a vector along a tile's rows (axis 0) or columns (1)."""
        layout = _TILE if axis is None else (_ROWS, _COLUMNS)[axis]
        return plgpu.load(ref, layout=layout, optimized=False)

    def load_rows(self, ref: Ref) -> Array:
        """Rows of device memory, a multiple of 128 numbers, to be stored as they are."""
        return plgpu.load(ref, layout=_strided(ref.shape), optimized=False)

    def zero_rows(self, shape: tuple[int, ...]) -> Array:
        """Zeros where `load_rows` has numbers."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _strided(shape))

    def rounded(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """The nearest numbers that bfloat16 has."""
        return values.astype(jnp.bfloat16).astype(jnp.float32)

    def product(self, left: Any, right: Ref, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
        """left @ right."""

        def multiply(sums: Any) -> Array:
            plgpu.wgmma(sums, left, right)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def add_product(self, sums: Float[Array, "rows columns"], left: Any, right: Ref) -> Float[Array, "rows columns"]:
        """sums + left @ right."""
        result: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.ACC.init(sums))
        return result

    def accumulators[Results](self, body: Callable[..., Results], *shapes: tuple[int, int]) -> Results:
        """What `body` returns for an accumulator of zeros for each of `shapes`."""
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def accumulate[Results](
        self, body: Callable[..., Results], *sums: Float[Array, "rows columns"], like: Results
    ) -> tuple[Results, tuple[Float[Array, "rows columns"], ...]]:
        """What `body` returns for accumulators that begin at `sums`, of the types of `like`; and the new sums."""
        leaves, tree = jax.tree.flatten(like)

        def store(refs: Any) -> None:
            accumulators, results = refs[: len(sums)], refs[len(sums) :]
            values = jax.tree.leaves(body(*accumulators))
            for ref, value in zip(results, values, strict=True):
                ref[...] = value

        done: Any = pl.run_state(store)((*map(plgpu.ACC.init, sums), *leaves))
        return jax.tree.unflatten(tree, done[len(sums) :]), tuple(done[: len(sums)])

    def begin(self, accumulator: Any, sums: Float[Array, "rows columns"]) -> None:
        """Let an accumulator to which nothing was added begin at `sums`."""
        accumulator[...] = sums

    def multiply(self, accumulator: Any, left: Any, right: Ref) -> None:
        """Add left @ right to an accumulator, in the background; products are made in their order."""
        plgpu.wgmma(accumulator, left, right)

    def read(self, accumulator: Any, behind: int = 0) -> Float[Array, "rows columns"]:
        """An accumulator, when all products but the last `behind` are made."""
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=behind)

    def choose(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        """`last`, which makes products and reads them all, or else `nothing`, when all products are made."""

        def wait() -> None:
            plgpu.wgmma_wait(0)
            nothing()

        lax.cond(condition, last, wait)

    def add_to(self, destination: Ref, source: Ref) -> None:
        """Add shared memory to device memory, in the background."""
        plgpu.copy_smem_to_gmem(source, destination, reduction_op="add")

    def commit(self) -> None:
        """Let copies and products see what was written to shared memory, and overwrite what was read of it."""
        plgpu.commit_smem()

    def pack(self, mask: Ref, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
        """A mask's bits, as words of `mask_bits`."""
        return mask_bits.pack(mask, plane, query, key, keys_first)

    def load_words(self, ref: Ref) -> Int[Array, "tiles 128"]:
        """Words of `mask_bits`."""
        return plgpu.load(ref, layout=mask_bits.layout(ref.shape), optimized=False)

    def bits(self, words: Int[Array, "tiles 128"], shape: tuple[int, int]) -> Bool[Array, "rows columns"]:
        """A tile of truth values from its words."""
        return mask_bits.expand(words, shape)

    def are_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        """Whether the sizes of all that a thread's warp has of a tile are; other warps may be told otherwise."""

        @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=_ANSWER)
        def vote(_: Any, tile: Any) -> Any:
            utils: Any = mgpu.utils
            arith, vector = utils.arith, utils.vector
            integer, number = utils.ir.IntegerType.get_signless(32), utils.ir.F32Type.get()
            element = lambda pair, at: vector.extract(pair, [], utils.ir.DenseI64ArrayAttr.get([at]))
            # Without the sign, which is the highest bit.
            bits = lambda x: arith.andi(arith.bitcast(integer, x), utils.c(0x7FFFFFFF, integer))
            sizes = [arith.bitcast(number, bits(element(pair, at))) for pair in tile.registers.flat for at in range(2)]
            # A tree: one after the other, each would wait for the one before. NaN is the largest, and below nothing.
            while len(sizes) > 1:
                sizes = [arith.maximumf(*two) for two in zip(sizes[::2], sizes[1::2], strict=True)]
            return _vote(arith.cmpf(arith.CmpFPredicate.OLT, sizes[0], utils.c(limit, number)))

        call: Any = vote
        return call(tile)

    def holds(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        """Whether it does for all rows of a thread's warp; other warps may be told otherwise."""

        @plgpu.inline_mgpu(arg_types=(_ROWS,), return_type=_ANSWER)
        def vote(_: Any, condition: Any) -> Any:
            utils: Any = mgpu.utils
            first = utils.ir.DenseI64ArrayAttr.get([0])
            own = [utils.vector.extract(row, [], first) for row in condition.registers.flat]
            own = functools.reduce(utils.arith.andi, own)
            return _vote(own)

        call: Any = vote
        return call(condition)

    def stay(self) -> None:
        """Nothing; but of two branches that end alike the compiler takes the end out, unless one has this behind it."""

        @plgpu.inline_mgpu()
        def nothing(_: Any) -> None:
            mgpu.utils.inline_ptx("", has_side_effects=True)

        call: Any = nothing
        call()

    def count(self, number: Ref) -> None:
        """Add 1 to an integer in device memory, when all that this warpgroup did is to be seen by who waits for it."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def add_one(_: Any, number: Any) -> None:
            utils = mgpu.utils
            mgpu.warpgroup_barrier()
            with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
                add = "red.release.gpu.global.add.s32 [$0], 1;"
                utils.inline_ptx(add, utils.memref_ptr(number), has_side_effects=True)

        call: Any = add_one
        call(number)

    def wait_until(self, number: Ref, value: int) -> None:
        """Wait until an integer in device memory has a value, and see what was done before it had."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def poll(_: Any, number: Any) -> None:
            utils = mgpu.utils
            loop = """{ .reg .pred other; .reg .b32 now;
            again: ld.acquire.gpu.global.s32 now, [$0]; setp.ne.s32 other, now, $1; @other bra again; }"""
            wanted = mgpu.c(value, utils.ir.IntegerType.get_signless(32))
            utils.inline_ptx(loop, utils.memref_ptr(number), wanted, has_side_effects=True)
            # What threads wrote themselves comes before what copies do now.
            utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

        call: Any = poll
        call(number)


def _vote(own: Any) -> Any:
    """Whether all threads of a warp say so."""
    utils: Any = mgpu.utils
    every = utils.c(0xFFFFFFFF, utils.ir.IntegerType.get_signless(32))
    return mgpu.FragmentedArray.splat(utils.nvvm.vote_sync(every, own, "all"), (), is_signed=False)


def _strided(shape: tuple[int, ...]) -> Any:
    """Numbers that are beside each other for each thread, up to four."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(4, math.prod(shape) // 128))


@dataclasses.dataclass
class Sums:
    """An accumulator of the interpreter."""

    value: Float[Array, "rows columns"]


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The same on any machine, slowly; finds races if asked. It needs a thread for every warpgroup of a block.

    A product is made as late as the hardware may: not before somebody waits for it.
    """

    interpret: plgpu.InterpretGPUParams
    processors: int | None
    pending: list[tuple[Sums, Any, Ref]] = dataclasses.field(default_factory=list[tuple[Sums, Any, Ref]], compare=False)
    """Products that nobody has waited for."""
    margin = 256
    """Rows and columns that `add_to` needs past the end of an array: it reads what it adds to."""

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        return jnp.full(shape, value, jnp.float32)

    def index(self, shape: tuple[int, int], axis: int) -> Int[Array, "rows columns"]:
        return lax.broadcasted_iota(jnp.int32, shape, axis)

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        return ref[...]

    def load_rows(self, ref: Ref) -> Array:
        return ref[...]

    def zero_rows(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, jnp.float32)

    def rounded(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        return rounded(values)

    def product(self, left: Any, right: Ref, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
        return self.add_product(jnp.zeros(shape, jnp.float32), left, right)

    def add_product(self, sums: Float[Array, "rows columns"], left: Any, right: Ref) -> Float[Array, "rows columns"]:
        a = left if isinstance(left, jax.Array) else left[...]
        b = right[...]
        plgpu.commit_smem()
        return sums + jnp.dot(a, b, preferred_element_type=jnp.float32)

    def add_to(self, destination: Ref, source: Ref) -> None:
        destination[...] = destination[...] + source[...]

    def commit(self) -> None:
        plgpu.commit_smem()

    def pack(self, mask: Ref, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
        return mask_bits.plainly_packed(mask[...], plane, query, key, keys_first)

    def load_words(self, ref: Ref) -> Int[Array, "tiles 128"]:
        return ref[...]

    def bits(self, words: Int[Array, "tiles 128"], shape: tuple[int, int]) -> Bool[Array, "rows columns"]:
        return mask_bits.plainly_expanded(words, shape)

    def are_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        return jnp.all(jnp.abs(tile) < limit)

    def holds(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        return jnp.all(condition)

    def stay(self) -> None:
        """Nothing."""

    def count(self, number: Ref) -> None:
        """Nothing: nobody has to wait, since blocks are run one after the other."""

    def wait_until(self, number: Ref, value: int) -> None:
        """Nothing."""

    def accumulators(self, body: Any, *shapes: tuple[int, int]) -> Any:
        return body(*(Sums(jnp.zeros(shape, jnp.float32)) for shape in shapes))

    def accumulate(self, body: Any, *sums: Float[Array, "rows columns"], like: Any) -> Any:
        accumulators = [Sums(array) for array in sums]
        results = body(*accumulators)
        self._finish(0)
        return results, tuple(accumulator.value for accumulator in accumulators)

    def begin(self, accumulator: Sums, sums: Float[Array, "rows columns"]) -> None:
        accumulator.value = sums

    def multiply(self, accumulator: Sums, left: Any, right: Ref) -> None:
        self.pending.append((accumulator, left, right))

    def read(self, accumulator: Sums, behind: int = 0) -> Float[Array, "rows columns"]:
        self._finish(behind)
        return accumulator.value

    def choose(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        self._finish(0)
        lax.cond(condition, last, nothing)

    def _finish(self, behind: int) -> None:
        while len(self.pending) > behind:
            accumulator, left, right = self.pending.pop(0)
            accumulator.value = self.add_product(accumulator.value, left, right)


Operations = Hardware | Interpreter
