"""Dropout in the order in which threads hold probabilities, so that each of a thread's words is made once.

Of row 16 warp + lane / 4 of a tile, and of the row 8 below, a thread holds the columns 8 j + 2 (lane % 4) + k for all j
and k < 2. Keys that are 8 apart share a word (`_semantics.dropout`): where rows are queries, those of an even j and of
j + 1; where rows are keys, both rows.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords
from jflash._semantics.dropout import FACTORS, GOLDEN


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
      p: the probabilities; the first key is a multiple of 16.
      counter: that of the first query and key.
      middle: the head's word that joins in the middle.
      dropped: the values of 16 bits, from 0 on, that drop.
      keys_first: whether rows are keys.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    return_type = plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, scalar, scalar), return_type=return_type)
    def made(_: Any, p: Any, counter: Any, middle: Any) -> Any:
        o = LaneWords()
        words = Words(o, counter.registers.item(), middle.registers.item(), keys_first)
        element = lambda pair, k: o.vector.extract(pair, [], o.ir.DenseI64ArrayAttr.get([k]))
        registers = np.empty_like(p.registers)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            pair = p.registers[index]
            chosen = words.drop([element(pair, k) for k in range(2)], eight, half, dropped, signed=signed)
            registers[index] = o.vector.from_elements(pair.type, chosen)
        return mgpu.FragmentedArray(_registers=registers, _layout=p.layout, _is_signed=None)

    call: Any = made
    return call(p, counter, middle)


class Words:
    """A thread's words, each made when its bits are asked for first."""

    def __init__(self, o: LaneWords, counter: Any, middle: Any, keys_first: bool) -> None:
        column = o.times(o.pair, 2)
        if keys_first:
            own = o.add(o.times(column, GOLDEN), o.times(o.warp, 8), o.row)
        else:
            own = o.add(o.times(o.add(o.times(o.warp, 16), o.row), GOLDEN), column)
        self.o, self.counter, self.middle, self.keys_first = o, o.add(counter, own), middle, keys_first
        self.made: dict[int, Any] = {}

    def drop(self, values: Sequence[Any], eight: int, half: int, dropped: int, *, signed: bool) -> list[Any]:
        """Two neighbours of the upper (half 0) or lower row, the columns from 8 `eight` on: see `drop`."""
        arith, chosen = self.o.arith, list[Any]()
        for k, value in enumerate(values):
            bits, least = self._bits(eight, half, k), self.o(dropped << 16)
            is_kept = arith.cmpi(arith.CmpIPredicate.uge, bits, least)
            chosen.append(arith.select(is_kept, value, arith.negf(value) if signed else self.o.zero))
        return chosen

    def _bits(self, eight: int, half: int, k: int) -> Any:
        """A word whose high bits are a probability's."""
        if self.keys_first:
            counter, is_high = (8 * eight + k) * GOLDEN, half
        else:
            counter, is_high = 8 * half * GOLDEN + 8 * (eight // 2) + k, eight % 2
        counter %= 2**32
        if counter not in self.made:
            self.made[counter] = self._mixed(self.o.add(self.counter, self.o(counter)))
        word = self.made[counter]
        return word if is_high else self.o.left(word, 16)

    def _mixed(self, bits: Any) -> Any:
        o = self.o
        bits = o.times(o.arith.xori(bits, o.right(bits, 16)), FACTORS[0])
        return o.times(o.arith.xori(o.arith.xori(bits, o.right(bits, 15)), self.middle), FACTORS[1])
