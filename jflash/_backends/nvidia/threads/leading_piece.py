"""The bfloat16 numbers nearest to a tile's float32 numbers, and what is left of those.

Two numbers are rounded by one instruction. Left to the compiler they are rounded one by one, by the unit that makes
exponentials, at a quarter of the speed.

Source: PTX ISA, cvt.rn.bf16x2.f32; CUDA C++ Programming Guide, throughput of native arithmetic instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32

from jflash._backends.nvidia.threads.builder import ThreadBuilder


def take(values: Float32[Array, "64 columns"]) -> tuple[BFloat16[Array, "64 columns"], Float32[Array, "64 columns"]]:
    """The nearest bfloat16 numbers, and the values less those."""
    tile = plgpu.Layout.WGMMA
    dtypes = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    return_type = tuple(plgpu.ShapeDtypeStruct(values.shape, dtype, layout=tile) for dtype in dtypes)

    @plgpu.inline_mgpu(arg_types=(tile,), return_type=return_type)
    def taken(_: Any, values: Any) -> Any:
        o = ThreadBuilder()
        pieces, rests = np.empty_like(values.registers), np.empty_like(values.registers)
        for index in np.ndindex(values.registers.shape):
            word, rest = of_pair(o, o.numbers(values.registers[index]))
            pieces[index], rests[index] = o.bfloat16(word), o.pair_of(rest)
        made = lambda registers: mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)
        return made(pieces), made(rests)

    call: Any = taken
    return call(values)


def of_pair(o: ThreadBuilder, numbers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The word of the bfloat16 numbers nearest to two numbers, and what is left of each."""
    word = o.rounded(numbers)
    rounded = o.left(word, 16), o.arith.andi(word, o(0xFFFF0000))
    rests = [o.arith.subf(number, o.number(bits)) for number, bits in zip(numbers, rounded, strict=True)]
    return word, rests
