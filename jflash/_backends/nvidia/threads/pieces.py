"""bfloat16 pieces of a tile's float32 numbers: the nearest one and what is left, or all of them side by side.

Two numbers are rounded by one instruction. Left to the compiler they are rounded one by one, by the unit that makes
exponentials, at a quarter of the speed.

Source: PTX ISA, cvt.rn.bf16x2.f32; CUDA C++ Programming Guide, throughput of native arithmetic instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, BFloat16, Float32

from jflash._backends.nvidia.threads.builder import TILE, ThreadBuilder, array_type, tile

PIECES = 3
"""bfloat16 numbers that together have the 24 bits of one float32 number."""


def leading(values: Float32[Array, "64 columns"]) -> tuple[BFloat16[Array, "64 columns"], Float32[Array, "64 columns"]]:
    """Return a tile's nearest bfloat16 numbers, and the values less those."""

    def make(o: ThreadBuilder, values: Any) -> Any:
        pair = o.ir.VectorType.get((2,), o.ir.BF16Type.get())
        pieces, rests = [], []
        for register in values.registers.flat:
            word, rest = of_pair(o, o.numbers(register))
            pieces.append(mgpu.utils.bitcast(word, pair))
            rests.append(o.vector_of(rest))
        return tile(values.shape, pieces), tile(values.shape, rests)

    returns = tuple(array_type(values.shape, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    return ThreadBuilder.emit(make, values, returns=returns)


def of_pair(o: ThreadBuilder, numbers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the word of the bfloat16 numbers nearest to two numbers, and what is left of each."""
    word = o.rounded(numbers)
    rounded = o.left(word, 16), o.arith.andi(word, o(0xFFFF0000))
    rests = [o.arith.subf(number, o.number(bits)) for number, bits in zip(numbers, rounded, strict=True)]
    return word, rests


def in_columns(numbers: Sequence[Float32[Array, "64"]], columns: int) -> BFloat16[Array, "64 columns"]:
    """Return the pieces of each row's first number, the largest first, of its second, ...; then zeros, to `columns`."""
    shape = (*numbers[0].shape, columns)

    def make(o: ThreadBuilder, *numbers: Any) -> Any:
        wide, narrow = o.zero.type, o.ir.BF16Type.get()
        pieces = []
        for rest in numbers:
            for _ in range(PIECES):
                pieces.append(rest.astype(narrow).astype(wide))
                rest = rest - pieces[-1]
        held: Any = dict(layout=mgpu.WGMMA_LAYOUT)
        index = mgpu.FragmentedArray.broadcasted_iota(o.type, shape, 1, **held, is_signed=True)
        made = mgpu.FragmentedArray.splat(o.zero, shape, **held)
        for column, piece in enumerate(pieces):
            here = index == mgpu.FragmentedArray.splat(o(column), shape, **held, is_signed=True)
            made = here.select(piece.broadcast_in_dim(shape, (0,), **held), made)
        return made.astype(narrow)

    returns = array_type(shape, jnp.bfloat16)
    return ThreadBuilder.emit(make, *numbers, returns=returns, layout=TILE.reduce(1))
