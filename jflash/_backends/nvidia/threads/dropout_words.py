"""Dropout in the order in which threads hold probabilities, so that each of a thread's words is made once.

Of row 16 warp + lane / 4 of a tile, and of the row 8 below, a thread holds the columns 8 j + 2 (lane % 4) + k for all j
and k < 2: of an even j and of j + 1, and of both rows, those four that have one counter (`_semantics.dropout`). Its two
words are at columns 4 j + 2 (lane % 4) + k of the same two rows of a tile of words, which has half as many columns.

Hopper's integer unit takes two cycles for an instruction of a warp, and the softmax needs it too; the floating-point
unit multiplies integers as fast, and numbers twice as fast. So a word's halves are compared in one instruction, as
numbers in half precision: without the sign they order as their bits do. And what is dropped is multiplied by 0.

Sources: PTX ISA, wgmma, the accumulator's fragment; CUDA programming guide, throughput of arithmetic instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from jflash._backends.nvidia.threads.builder import ThreadBuilder
from jflash._semantics.dropout import FACTORS, GOLDEN, RATES, SHIFTS_AND_FACTORS

_INFINITY = 0x7C00
"""Its bits in half precision. Those above are NaN's."""


def words(
    counter: UInt32[Array, ""], middle: UInt32[Array, ""], shape: tuple[int, ...], *, keys_first: bool
) -> UInt32[Array, "64 half_the_columns"]:
    """The words of a tile of `shape`.

    Args:
      counter: that of the first query and key, which are multiples of 16.
      middle: the head's word that joins in the middle.
      shape: the tile's.
      keys_first: whether rows are keys.
    """
    scalar, made_shape = plgpu.Layout.WG_SPLAT(()), (shape[0], shape[1] // 2)
    return_type = plgpu.ShapeDtypeStruct(made_shape, np.dtype(np.uint32), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(scalar, scalar), return_type=return_type)
    def made(_: Any, counter: Any, middle: Any) -> Any:
        o = ThreadBuilder()
        words = Words(o, counter.registers.item(), middle.registers.item(), keys_first=keys_first)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(made_shape), dtype=object)
        for index in np.ndindex(registers.shape):
            _, sixteen, _, _, query, *_ = index
            registers[index] = o.pair_of([words.word(sixteen, query, k) for k in range(2)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=False)

    call: Any = made
    return call(counter, middle)


def drop(
    p: Float[Array, "64 columns"],
    words: UInt32[Array, "64 half_the_columns"],
    dropped: int,
    *,
    keys_first: bool,
    signed: bool,
) -> Float[Array, "64 columns"]:
    """A tile without what is dropped or, `signed`, with the sign of that changed.

    Args:
      p: the probabilities, which are finite.
      words: the tile's.
      dropped: the values of 15 bits, from 0 on, that drop.
      keys_first: whether rows are keys.
      signed: what to do with the dropped.
    """
    return_type = plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA), return_type=return_type)
    def made(_: Any, p: Any, words: Any) -> Any:
        o = ThreadBuilder()
        pairs: dict[Any, list[Any]] = {index: o.numbers(p.registers[index]) for index in np.ndindex(p.registers.shape)}
        for index in np.ndindex(words.registers.shape):
            _, sixteen, _, _, query, *rest = index
            decides = decided(sixteen, query, keys_first=keys_first)
            at = [(0, eight, 0, 0, half, *rest) for eight, half in decides]
            for k, word in enumerate(o.numbers(words.registers[index])):
                numbers = chosen(o, word, [pairs[place][k] for place in at], dropped, signed=signed)
                for place, number in zip(at, numbers, strict=True):
                    pairs[place][k] = number
        registers = np.empty_like(p.registers)
        for index, pair in pairs.items():
            registers[index] = o.pair_of(pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=p.layout, _is_signed=None)

    call: Any = made
    return call(p, words)


class Words:
    """A thread's words."""

    def __init__(self, o: ThreadBuilder, counter: Any, middle: Any, *, keys_first: bool) -> None:
        row, column = o.add(o.times(o.warp, 8), o.row), o.times(o.pair, 2)
        queries, keys = (column, row) if keys_first else (row, column)
        self.o, self.counter = o, o.add(counter, o.times(queries, GOLDEN), keys)
        self.middle, self.keys_first = middle, keys_first
        self.mixed: dict[int, Any] = {}

    def word(self, sixteen: int, query: int, k: int) -> Any:
        """That of the first or second `query` of four, in the columns from 16 `sixteen` on."""
        o, (shift, factor) = self.o, SHIFTS_AND_FACTORS[query]
        place = 8 * sixteen + k
        counter = place * GOLDEN % 2**32 if self.keys_first else place
        if counter not in self.mixed:
            bits = o.add(self.counter, o(counter))
            self.mixed[counter] = o.times(o.arith.xori(bits, o.right(bits, 16)), FACTORS[0])
        mixed = self.mixed[counter]
        return o.times(o.arith.xori(o.arith.xori(mixed, o.right(mixed, shift)), self.middle), factor)


def decided(sixteen: int, query: int, *, keys_first: bool) -> list[tuple[int, int]]:
    """What the lower and the higher half of a word decide for, as (eight, half): in the columns from 8 `eight` on, of
    the upper (half 0) or lower row."""
    if keys_first:
        return [(2 * sixteen + query, half) for half in range(2)]
    return [(2 * sixteen + high, query) for high in range(2)]


def chosen(o: ThreadBuilder, word: Any, numbers: Sequence[Any], dropped: int, *, signed: bool) -> Sequence[Any]:
    """The float32 numbers for which a word's halves decide, without what they drop or with the sign of that changed."""
    change = "negate" if signed else "clear"
    if dropped <= _INFINITY:
        # NaN is not below anything, so it is kept.
        return o.change_where(change, "lt", word, dropped, numbers)
    # The limit itself would be NaN. Of what is kept, the complement is at most the limit's.
    return o.change_where(change, "gtu", o.arith.xori(word, o(2**32 - 1)), RATES - 1 - dropped, numbers)
