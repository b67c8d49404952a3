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
from jaxtyping import Array, Float, UInt32

from jflash._backends.nvidia.threads.builder import ThreadBuilder, array_type, places, tile
from jflash._semantics.dropout import FACTORS, GOLDEN, RATES, SHIFTS_AND_FACTORS

_INFINITY = 0x7C00
"""The bits of infinity in half precision; larger ones are NaN's."""


def words(
    counter: UInt32[Array, ""], middle: UInt32[Array, ""], shape: tuple[int, ...], *, keys_first: bool
) -> UInt32[Array, "64 half_the_columns"]:
    """Return the words of a tile of a shape, of which rows may be keys.

    `counter` is that of its first query and key, multiples of 16; `middle` is the head's word that joins there.
    """
    made = shape[0], shape[1] // 2

    def make(o: ThreadBuilder, counter: Any, middle: Any) -> Any:
        words = Words(o, counter, middle, keys_first=keys_first)
        pairs = ([words.word(*place, k) for k in range(2)] for place in places(made[1]))
        return tile(made, map(o.vector_of, pairs), is_signed=False)

    return ThreadBuilder.emit(make, counter, middle, returns=array_type(made, np.uint32))


def drop(
    p: Float[Array, "64 columns"],
    words: UInt32[Array, "64 half_the_columns"],
    dropped: int,
    *,
    keys_first: bool,
    signed: bool,
) -> Float[Array, "64 columns"]:
    """Return a tile of finite probabilities without what is dropped or, `signed`, with the sign of that changed.

    Of the values of 15 bits that its `words` have those below `dropped` drop.
    """

    def make(o: ThreadBuilder, p: Any, words: Any) -> Any:
        pairs = list(map(o.numbers, p.registers.flat))
        for (sixteen, query), both in zip(places(words.shape[1]), words.registers.flat, strict=True):
            decides = [2 * eight + half for eight, half in decided(sixteen, query, keys_first=keys_first)]
            for k, word in enumerate(o.numbers(both)):
                numbers = chosen(o, word, [pairs[at][k] for at in decides], dropped, signed=signed)
                for at, number in zip(decides, numbers, strict=True):
                    pairs[at][k] = number
        return tile(p.shape, map(o.vector_of, pairs))

    return ThreadBuilder.emit(make, p, words, returns=array_type(p.shape, p.dtype))


class Words:
    """The words of dropout that a thread has of a tile."""

    def __init__(self, o: ThreadBuilder, counter: Any, middle: Any, *, keys_first: bool) -> None:
        row, column = o.add(o.times(o.warp, 8), o.row), o.first_column
        queries, keys = (column, row) if keys_first else (row, column)
        self.o, self.counter = o, o.add(counter, o.times(queries, GOLDEN), keys)
        self.middle, self.keys_first = middle, keys_first
        self.mixed: dict[int, Any] = {}

    def word(self, sixteen: int, query: int, k: int) -> Any:
        """Return the word of the first or second `query` of four, in the columns from 16 `sixteen` on."""
        o, (shift, factor) = self.o, SHIFTS_AND_FACTORS[query]
        place = 8 * sixteen + k
        counter = place * GOLDEN % 2**32 if self.keys_first else place
        if counter not in self.mixed:
            bits = o.add(self.counter, o(counter))
            self.mixed[counter] = o.times(o.arith.xori(bits, o.right(bits, 16)), FACTORS[0])
        mixed = self.mixed[counter]
        return o.times(o.arith.xori(o.arith.xori(mixed, o.right(mixed, shift)), self.middle), factor)


def decided(sixteen: int, query: int, *, keys_first: bool) -> list[tuple[int, int]]:
    """Return (eight, half) of what the lower and of what the higher half of a word decides for."""
    if keys_first:
        return [(2 * sixteen + query, half) for half in range(2)]
    return [(2 * sixteen + high, query) for high in range(2)]


def chosen(o: ThreadBuilder, word: Any, numbers: Sequence[Any], dropped: int, *, signed: bool) -> Sequence[Any]:
    """Return the float32 numbers for which a word's halves decide, the dropped ones as 0 or, `signed`, negated."""
    change = "negate" if signed else "clear"
    if dropped <= _INFINITY:
        # NaN is not below anything, so it is kept.
        return o.change_where(change, "lt", word, dropped, numbers)
    # The limit itself would be NaN. Of what is kept, the complement is at most the limit's.
    return o.change_where(change, "gtu", o.arith.xori(word, o(2**32 - 1)), RATES - 1 - dropped, numbers)
