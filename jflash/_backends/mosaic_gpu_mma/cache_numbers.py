"""The numbers of a paged cache, converted to what the matrix unit takes.

A thread has eight neighbours of a row. They become float32 numbers, are multiplied by the cache's scale if it has one,
and are rounded to the query's dtype, as in `_semantics.pages`. Those of a float32 query become bfloat16 pieces, as
`operand_pieces.split_array` makes them.

Source: Micikevicius et al., arXiv:2209.05433, for the two formats of float8.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK

_LARGEST_BFLOAT16, _INFINITY, _UPPER_HALF = 0x7F7F0000, 0x7F800000, 0xFFFF0000
"""Bits of float32 numbers; the upper half of them is a bfloat16 number."""

UNITS: Mapping[str, float] = {"float8_e4m3fn": 256.0}
"""What numbers of a dtype that `load` returns are to be multiplied by, if that is not 1."""


def load(o: Lanes, dtype: str, address: Any, offset: int) -> list[Any]:
    """Return eight neighbours of a row in device memory as float32 numbers, but for a factor of `UNITS`."""
    numbers_of_word, item_bytes = _NUMBERS[dtype]
    count = CHUNK * item_bytes // 4
    loads = [o.load_words(address, offset + 4 * at, min(count, 4)) for at in range(0, count, 4)]
    return [number for words in loads for word in words for number in numbers_of_word(o, word)]


def chunks(o: Lanes, dtype: str, numbers: Sequence[Any], pieces: int) -> list[list[Any]]:
    """Return eight float32 numbers as four words of numbers of 16 bits, once for each of their pieces."""
    pairs, made = list(itertools.batched(numbers, 2)), list[list[Any]]()
    while len(made) < pieces - 1:
        words, rests = zip(*(_leading_piece(o, pair) for pair in pairs), strict=True)
        made.append(list(words))
        pairs = list(rests)
    return [*made, [o.rounded_to(dtype, pair) for pair in pairs]]


def _leading_piece(o: Lanes, pair: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the word of the first pieces of two numbers, and what is left of each.

    The piece of a finite number is finite, and nothing is left of one that is not.
    """
    bits = [o.bits(number) for number in pair]
    word = o.rounded([o.number(_roundable(o, each)) for each in bits])

    def rest(number: Any, bits: Any, rounded: Any) -> Any:
        is_finite = o.differ(o.arith.andi(bits, o(_INFINITY)), o(_INFINITY))
        return o.arith.select(is_finite, o.arith.subf(number, o.number(rounded)), o.zero)

    return word, tuple(map(rest, pair, bits, _upper_halves(o, word)))


def _roundable(o: Lanes, bits: Any) -> Any:
    """Return a number's bits, or those of the largest bfloat16 number if it is between that and infinity."""
    above = o.arith.subi(o.arith.andi(bits, o(0x7FFFFFFF)), o(_LARGEST_BFLOAT16))
    is_between = o.arith.cmpi(o.arith.CmpIPredicate.ult, above, o(_INFINITY - _LARGEST_BFLOAT16))
    return o.arith.select(is_between, o.arith.andi(bits, o(_UPPER_HALF)), bits)


def _upper_halves(o: Lanes, word: Any) -> tuple[Any, Any]:
    """Return each half of a word as the upper half of one."""
    return o.left(word, 16), o.arith.andi(word, o(_UPPER_HALF))


def _bytes_as_halves(o: Lanes, word: Any) -> list[Any]:
    """Return two words with a word's bytes, each the upper byte of 16 bits."""
    first, second = (o.right(word, by) for by in (0, 16))
    lower, upper = (lambda word: o.left(o.arith.andi(word, o(0xFF)), 8)), (lambda word: o.left(word, 16))
    return [o.either(lower(word), o.arith.andi(upper(word), o(0xFF000000))) for word in (first, second)]


def _of_e5m2(o: Lanes, word: Any) -> list[Any]:
    """Return four numbers, each the upper byte of one in half precision."""
    return [number for half in _bytes_as_halves(o, word) for number in o.halves(half)]


def _of_e4m3fn(o: Lanes, word: Any) -> list[Any]:
    """Return four numbers, divided by 256: the exponent of half precision has a bit more and counts from 8 lower."""

    def shifted(half: Any) -> Any:
        size = o.right(o.arith.andi(half, o(0x7F007F00)), 1)
        # Where all bits are set it is NaN, and the bit above becomes the last that NaN has in half precision.
        is_nan = o.arith.andi(o.add(size, o(0x00800080)), o(0x40004000))
        return o.either(o.arith.andi(half, o(0x80008000)), size, is_nan)

    return [number for half in _bytes_as_halves(o, word) for number in o.halves(shifted(half))]


def _of_bytes(o: Lanes, word: Any) -> list[Any]:
    """Return four signed integers."""
    return [o.float32(o.arith.shrsi(o.left(word, 24 - 8 * byte), o(24))) for byte in range(4)]


_NUMBERS: Mapping[str, tuple[Callable[[Lanes, Any], list[Any]], int]] = {
    "float8_e4m3fn": (_of_e4m3fn, 1),
    "float8_e5m2": (_of_e5m2, 1),
    "int8": (_of_bytes, 1),
    "float16": (lambda o, word: o.halves(word), 2),
    "bfloat16": (lambda o, word: list(map(o.number, _upper_halves(o, word))), 2),
    "float32": (lambda o, word: [o.number(word)], 4),
}
"""How a word's numbers become float32 numbers, and the bytes of a number, by the cache's dtype."""
