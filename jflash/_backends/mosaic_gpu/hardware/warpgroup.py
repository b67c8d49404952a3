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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from jflash._backends.mosaic_gpu.hardware import packed_mask, ptx

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
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)

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

    def rounded(self, values: Float[Array, "..."]) -> Float[Array, "..."]:
        """The nearest bfloat16 numbers."""
        return values.astype(jnp.bfloat16).astype(jnp.float32)

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

    def mma(self, accumulator: Any, a: Any, b: Ref) -> None:
        """Issue accumulator += a @ b; products are made in the order of their issue."""
        plgpu.wgmma(accumulator, a, b)

    def read(self, accumulator: Any, pending: int = 0) -> Float[Array, "rows columns"]:
        """An accumulator, when all products but the last `pending` are made."""
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)

    def matmul(self, a: Any, b: Ref, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
        """a @ b."""

        def multiply(acc: Any) -> Array:
            self.mma(acc, a, b)
            return self.read(acc)

        return self.accumulators(multiply, shape)

    def add_matmul(self, acc: Float[Array, "rows columns"], a: Any, b: Ref) -> Float[Array, "rows columns"]:
        """acc + a @ b."""
        _, (acc,) = self.accumulate(lambda ref: self.mma(ref, a, b), acc, like=None)
        return acc

    def cond(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        """`last`, which issues products and reads them all, or else `nothing`, when all products are made."""

        def wait() -> None:
            plgpu.wgmma_wait(0)
            nothing()

        lax.cond(condition, last, wait)

    def reduce_add(self, destination: Ref, source: Ref) -> None:
        """Issue a copy that adds shared memory to device memory."""
        plgpu.copy_smem_to_gmem(source, destination, reduction_op="add")

    def pack_mask(self, mask: Ref, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
        """A packed mask's words for 64 x 64 elements of a mask."""
        return packed_mask.pack(mask, plane, query, key, keys_first)

    def expand_mask(self, words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "rows columns"]:
        """A tile of booleans from its words."""
        return packed_mask.expand(words, shape)

    def warp_all_below(self, tile: Float[Array, "rows columns"], limit: float) -> Bool[Array, ""]:
        """Whether all magnitudes that a thread's warp holds of a tile are below a limit; warps may differ."""
        return _inline(functools.partial(ptx.all_below, limit=limit), _TILE, returns=_WARP_UNIFORM)(tile)

    def warp_all(self, condition: Bool[Array, "rows"]) -> Bool[Array, ""]:
        """Whether a condition holds for all rows of a thread's warp; warps may differ."""
        return _inline(ptx.all_rows, _ROWS, returns=_WARP_UNIFORM)(condition)

    def prevent_tail_merge(self) -> None:
        """Keep the compiler from merging the equal ends of two branches, at the end of one of them."""
        _inline(ptx.nothing)()

    def take_ticket(self, counter: Ref, ticket: Ref) -> None:
        """Increment an integer in device memory, and store its old value in shared memory."""
        _inline(ptx.take_ticket, plgpu.RefType(), plgpu.RefType())(counter, ticket)

    def signal(self, counter: Ref) -> None:
        """Increment an integer in device memory, and with it publish all that this warpgroup did."""
        _inline(ptx.signal, plgpu.RefType())(counter)

    def wait_for(self, counter: Ref, value: int) -> None:
        """Wait until an integer in device memory has a value, and see what was done before it had."""
        _inline(functools.partial(ptx.wait_for, value=value), plgpu.RefType())(counter)


class _Hopper(WarpgroupOps):
    interpret = None
    margin = 0


HOPPER: WarpgroupOps = _Hopper()


def _inline(instructions: Callable[..., Any], *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    return plgpu.inline_mgpu(arg_types=arguments, return_type=returns)(instructions)


def _strided(shape: tuple[int, ...], most: int = 4) -> Any:
    return plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(most, math.prod(shape) // 128))
