"""Dropout in the order in which threads hold probabilities, so that each of a thread's words is made once.

Of row 16 warp + lane / 4 of a tile, and of the row 8 below, a thread holds the columns 8 j + 2 (lane % 4) + k for all j
and k < 2: of an even j and of j + 1, and of both rows, those four that have one counter (`_semantics.dropout`).

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords
from jflash._semantics.dropout import FACTORS, GOLDEN, RATES, SHIFTS_AND_FACTORS


def drop(
    p: Float[Array, "64 columns"],
    counter: UInt32[Array, ""],
    middle: UInt32[Array, ""],
    dropped: int,
    *,
    keys_first: bool,
    signed: bool,
) -> Float[Array, "64 columns"]:
    """A tile without what is dropped or, `signed`, with the sign of that changed.

    Args:
      p: the probabilities; the first query and key are multiples of 16.
      counter: that of the first query and key.
      middle: the head's word that joins in the middle.
      dropped: the values of 15 bits, from 0 on, that drop.
      keys_first: whether rows are keys.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    return_type = plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, scalar, scalar), return_type=return_type)
    def made(_: Any, p: Any, counter: Any, middle: Any) -> Any:
        o = LaneWords()
        words = Words(o, counter.registers.item(), middle.registers.item(), dropped, keys_first=keys_first)
        registers = np.empty_like(p.registers)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            pair = p.registers[index]
            choose = words.signed if signed else words.kept
            chosen = [choose(value, eight, half, k) for k, value in enumerate(o.numbers(pair))]
            registers[index] = o.vector.from_elements(pair.type, chosen)
        return mgpu.FragmentedArray(_registers=registers, _layout=p.layout, _is_signed=None)

    call: Any = made
    return call(p, counter, middle)


class Words:
    """A thread's words, each made when its bits are asked for first.

    `eight` and `half` say which probabilities: of the upper (half 0) or lower row, the columns from 8 `eight` on.
    """

    def __init__(self, o: LaneWords, counter: Any, middle: Any, dropped: int, *, keys_first: bool) -> None:
        row, column = o.add(o.times(o.warp, 8), o.row), o.times(o.pair, 2)
        queries, keys = (column, row) if keys_first else (row, column)
        self.o, self.counter = o, o.add(counter, o.times(queries, GOLDEN), keys)
        self.middle, self.dropped, self.keys_first = middle, dropped, keys_first
        self.mixed: dict[int, Any] = {}
        self.made: dict[tuple[int, int], Any] = {}

    def kept(self, value: Any, eight: int, half: int, k: int) -> Any:
        """A float32 if it is kept, or 0."""
        o = self.o
        return o.arith.select(o.below(self._highest(eight, half, k), o(0)), value, o.zero)

    def signed(self, value: Any, eight: int, half: int, k: int) -> Any:
        """A float32 with its sign changed if it is dropped."""
        o = self.o
        is_dropped = o.arith.xori(self._highest(eight, half, k), o(RATES | RATES << 16))
        flipped = o.arith.xori(o.bits(value), o.arith.andi(is_dropped, o(1 << 31)))
        return o.number(flipped)

    def _highest(self, eight: int, half: int, k: int) -> Any:
        """A word whose highest bit says that the probability is kept."""
        word, is_high = self._word(eight, half, k)
        return word if is_high else self.o.left(word, 16)

    def _word(self, eight: int, half: int, k: int) -> tuple[Any, int]:
        """A word and which half of it is a probability's; the half's highest bit says whether that is kept."""
        place = 8 * (eight // 2) + k
        counter = place * GOLDEN % 2**32 if self.keys_first else place
        query, is_high = (eight % 2, half) if self.keys_first else (half, eight % 2)
        if (counter, query) not in self.made:
            self.made[counter, query] = self._compared(self._finished(counter, query))
        return self.made[counter, query], is_high

    def _finished(self, counter: int, query: int) -> Any:
        o, (shift, factor) = self.o, SHIFTS_AND_FACTORS[query]
        if counter not in self.mixed:
            bits = o.add(self.counter, o(counter))
            self.mixed[counter] = o.times(o.arith.xori(bits, o.right(bits, 16)), FACTORS[0])
        mixed = self.mixed[counter]
        return o.times(o.arith.xori(o.arith.xori(mixed, o.right(mixed, shift)), self.middle), factor)

    def _compared(self, word: Any) -> Any:
        """Of each half's 15 bits, whether they are `dropped` at least: with a bit above them no half borrows of the
        other."""
        o, both = self.o, 1 | 1 << 16
        return o.add(o.either(word, o(RATES * both)), o(-self.dropped * both % 2**32))
