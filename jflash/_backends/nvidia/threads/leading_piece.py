"""The bfloat16 numbers nearest to a tile's float32 numbers, and what is left of those.

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

from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, tile


def take(values: Float32[Array, "64 columns"]) -> tuple[BFloat16[Array, "64 columns"], Float32[Array, "64 columns"]]:
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
