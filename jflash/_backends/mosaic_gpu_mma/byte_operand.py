"""Tiles of 8-bit numbers in shared memory as operands of products of 16 bits: they are converted in registers.

`ldmatrix` takes two neighbours of a row for one number of 16 bits, and a lane converts the first numbers of both pairs
in its word together, and then the second ones. So columns come in another order than those of 16-bit numbers:

    keys, B = K^T: of 16 columns in K a lane has four neighbours, the first and third as one word, the second and fourth
      as the other; A has the same order (`rows_beside_bytes`)
    values, B = V: of 16 columns of the product the first eight are the even ones, the others the odd ones, until
      `warp_sums` puts them in order

Every number of 8 bits is one of bfloat16 and of float16.

Source: Micikevicius et al., arXiv:2209.05433, for the two formats of float8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import SmemOperand, SmemTile


class ByteOperand(SmemOperand):
    """A tile of 8-bit numbers as B, by the tile of 16-bit numbers that has its bytes."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, dtypes: tuple[str, str]) -> None:
        """`dtypes` are that of the tile's numbers and that of the product's operands."""
        super().__init__(o, tile, base)
        self._convert = _CONVERSIONS[dtypes](o)
        self._loaded: dict[tuple[int, int], Sequence[Any]] = {}

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        # A chunk of bytes is two of numbers, and two of these are loaded together.
        first, own = chunk // 4 * 2, chunk // 2 % 2
        if (row, first) not in self._loaded:
            self._loaded[row, first] = super().matrices(row, first, rows_first=rows_first, transpose=transpose)
        loaded = self._loaded[row, first]
        words = loaded[2 * own : 2 * own + 2] if rows_first else loaded[own::2]
        (even, odd), (even_below, odd_below) = map(self._converted, words)
        return (even, even_below, odd, odd_below) if transpose else (even, odd, even_below, odd_below)

    def _converted(self, word: Any) -> tuple[Any, Any]:
        """Return the first and third byte of a word as two numbers of 16 bits, and the second and fourth."""
        return self._convert(word, False), self._convert(word, True)


def rows_beside_bytes(o: Lanes, tile: SmemTile, base: Any) -> list[Any]:
    """Return 16 rows of 16-bit numbers in shared memory, the same for every warp, as A for B of 8-bit numbers."""
    # A lane has four neighbours of a row, half a chunk.
    chunk, half_chunk = o.right(o.pair, 1), o.left(o.arith.andi(o.pair, o(1)), 3)
    start = o.add(base, o.times(o.row, tile.pitch), tile.permuted(o, o.row, chunk), half_chunk)
    words = list[Any]()
    for first in range(0, tile.columns // 8, 2):
        address = o.arith.xori(start, o(16 * (first % tile.chunks)))
        offset = tile.place(0, first - first % tile.chunks)
        rows = [[o.load_word(address, offset + 8 * half * tile.pitch + 4 * at) for at in range(2)] for half in range(2)]
        words += [o.either(o.arith.andi(low, o(0xFFFF)), o.left(high, 16)) for low, high in rows]
        words += [o.either(o.right(low, 16), o.arith.andi(high, o(0xFFFF0000))) for low, high in rows]
    return words


Convert = Callable[[Any, bool], Any]
"""Takes a word, and whether it is the upper byte of both halves that is meant, to these as two numbers of 16 bits."""


def _of_floats(dtype: str, shift: int, last: int, scale: int, o: Lanes) -> Convert:
    """Return the conversion of a word's floating-point numbers to two of a `dtype`, by their bits.

    Args:
      dtype: bfloat16 or float16.
      shift: how many bits its exponent has more.
      last: where all bits of a number from this one on are 1, in the upper byte of 16, the exponent has to be all 1.
      scale: the bits of the power of two by which the units of both dtypes differ.
      o: the builder of the instructions.
    """
    both = lambda half: o(half * 0x10001)
    sizes, signs, factor, minus_zero = map(both, (0x7F00, 0x8000, scale, 0x8000))
    last_bits, carries = both(last >> shift), both(0x8000 >> shift)

    def convert(word: Any, is_upper: bool) -> Any:
        word = word if is_upper else o.left(word, 8)
        if shift == 0:
            return o.arith.andi(word, both(0xFF00))
        size = o.right(o.arith.andi(word, sizes), shift)
        carry = o.arith.andi(o.add(size, last_bits), carries)
        size = o.add(size, o.times(carry, 2**shift - 1))
        return o.multiply_add(dtype, o.either(size, o.arith.andi(word, signs)), factor, minus_zero)

    return convert


def _of_integers(dtype: str, unit: int, one: int, o: Lanes) -> Convert:
    """Return the conversion of a word's signed integers to two of a `dtype`.

    Seven bits are the last ones of a number and the sign one of another's, and their difference is made. `unit` has the
    bits of a number whose last bit is 1, and `one` those of 1.
    """
    both = lambda half: o(half * 0x10001)
    # An instruction takes one constant, so the other has a register.
    digits, signs, ones = (o.held(half * 0x10001) for half in (0x7F, 0x80, one))

    def convert(word: Any, is_upper: bool) -> Any:
        low = o.right(word, 8) if is_upper else word
        positive = o.either(o.arith.andi(low, digits), both(unit))
        negative = o.either(o.arith.andi(low, signs), both(unit | 0x8000))
        return o.multiply_add(dtype, positive, ones, negative)

    return convert


_CONVERSIONS: Mapping[tuple[str, str], Callable[[Lanes], Convert]] = {
    ("float8_e4m3fn", "bfloat16"): functools.partial(_of_floats, "bfloat16", 4, 0x0100, 0x7B80),
    ("float8_e5m2", "bfloat16"): functools.partial(_of_floats, "bfloat16", 3, 0x0400, 0x7780),
    ("int8", "bfloat16"): functools.partial(_of_integers, "bfloat16", 0x4300, 0x3F80),
    ("float8_e4m3fn", "float16"): functools.partial(_of_floats, "float16", 1, 0x0100, 0x5C00),
    ("float8_e5m2", "float16"): functools.partial(_of_floats, "float16", 0, 0x0400, 0x3C00),
    ("int8", "float16"): functools.partial(_of_integers, "float16", 0x6400, 0x3C00),
}
"""Conversions, by the dtypes from and to which they go."""
