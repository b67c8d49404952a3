"""What the kernels of both families ask of a warpgroup: the operations on its tiles that are no products and no copies.

A tile of logits is `[64, columns]` in the layout in which Hopper's matrix unit leaves it, on other GPUs too. Pallas'
interpreter knows no layouts and no instructions, so the tests have a plain implementation of every operation.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia.threads import (
    coordinates,
    device_rows,
    dropout_words,
    hidden_rows,
    packed_mask,
    pieces,
    reductions,
    table,
    vectors,
)
from jflash._backends.nvidia.threads.builder import SCALAR, TILE, ThreadBuilder, array_type, meet, scalar, strided

Ref = Any
"""A reference to shared or device memory, or a part of one."""
Tile = Float[Array, "rows columns"]
"""A tile in registers."""
Rows = Float[Array, "rows"]
"""A number for each row of a tile, in registers."""

_utils: Any = mgpu.utils


def along_rows(vector: Rows, shape: tuple[int, ...]) -> Tile:
    """Return one value for each row, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector: Float[Array, "columns"], shape: tuple[int, ...]) -> Tile:
    """Return one value for each column, repeated along it."""
    return lax.broadcast_in_dim(vector, shape, [1])


def rounded(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the nearest bfloat16 numbers, in what XLA compiles: it may drop a conversion there and back."""
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


class Ops:
    """The operations of a warpgroup that GPUs have since Ampere."""

    interpret: Any = None
    """Pallas' parameters where the kernel runs in its interpreter."""
    margin = 0
    """Rows and columns that additions in device memory need past the end of an array."""

    def full(self, shape: tuple[int, ...], value: float) -> Float[Array, "..."]:
        """Return a tile, or with one axis a vector along a tile's rows, of one value."""
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), TILE if len(shape) == 2 else TILE.reduce(1))

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "rows columns"]:
        """Return each element's index along `axis`, counted from `first` on."""
        # An index is a quotient or remainder by the number of columns: of a power of two the compiler makes one sum.
        whole = shape[0], pl.next_power_of_2(shape[1])
        return lax.slice(plgpu.broadcasted_iota(jnp.int32, whole, axis, layout=TILE), (0, 0), shape) + first

    def load(self, ref: Ref, axis: int | None = None) -> Array:
        """Return a tile; or a vector along a tile's rows (axis 0) or columns (1)."""
        return plgpu.load(ref, layout=TILE if axis is None else TILE.reduce(1 - axis), optimized=False)

    def load_strided(self, ref: Ref, most: int = 4) -> Array:
        """Return rows of device memory, a multiple of 128 numbers, of which threads have `most` neighbours."""
        return plgpu.load(ref, layout=strided(ref.shape, most), optimized=False)

    def opaque_zero(self, step: Any) -> Int[Array, ""]:
        """Return 0 that the compiler cannot fold, in a loop over `step`: the index of a tile that stays in place.

        Otherwise it keeps the addresses of all the tile's parts in registers, and spills them. An addition makes each.
        """
        shift = lambda o, step: scalar(_utils.inline_ptx("shr.u32 $0, $1, 30;", step, result_types=o.type))
        return ThreadBuilder.emit(shift, step, returns=array_type((), jnp.int32, SCALAR))

    def prevent_tail_merge(self) -> None:
        """Keep the compiler from merging the equal ends of two branches, at the end of one of them."""
        ThreadBuilder.emit(lambda _: _utils.inline_ptx("", has_side_effects=True))

    meet = staticmethod(meet)
    distances = staticmethod(coordinates.distances)
    key_minus_query = staticmethod(coordinates.key_minus_query)
    leading_piece = staticmethod(pieces.leading)
    partial_sums = staticmethod(reductions.partial_sums)
    pack_mask = staticmethod(packed_mask.pack)
    expand_mask = staticmethod(packed_mask.expand)
    drop = staticmethod(dropout_words.drop)
    dropout_words = staticmethod(dropout_words.words)
    gather = staticmethod(table.gather)
    add_by_index = staticmethod(table.add)
    threads = staticmethod(vectors.indices)
    gather_by_thread = staticmethod(vectors.gather)
    scatter_by_thread = staticmethod(vectors.scatter)
    warp_all_below = staticmethod(reductions.all_below)
    warp_all = staticmethod(reductions.all_rows)
    load_tile = staticmethod(device_rows.load_tile)
    fetch_rows = staticmethod(device_rows.fetch_rows)
    store_rows = staticmethod(device_rows.store_rows)
    zero_hidden_rows = staticmethod(hidden_rows.zero)
