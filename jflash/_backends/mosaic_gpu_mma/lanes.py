"""The instructions that a warpgroup's threads issue together, each on words of its own.

Source: PTX ISA, ldmatrix, mma.m16n8k16 and cp.async.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.nvidia.threads.builder import ThreadBuilder

_utils: Any = mgpu.utils


class Lanes(ThreadBuilder):
    """Operations of MLIR, and instructions that it has none for; the tests have them in array code."""

    def load_matrices(self, address: Any, offset: int, *, transpose: bool) -> Sequence[Any]:
        """Return four 8 x 8 matrices of 16-bit numbers in shared memory; eight lanes address the rows of one."""
        suffix = ".trans" if transpose else ""
        load = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        words = [self.type] * 4
        return _utils.inline_ptx(load, address, result_types=words, has_side_effects=True, convergent=True)

    def load_number(self, address: Any, offset: int) -> Any:
        """Return a float32 number of shared memory."""
        load = f"ld.shared.f32 $0, [$1 + {offset}];"
        return _utils.inline_ptx(load, address, result_types=self.zero.type, has_side_effects=True)

    def multiply(self, dtype: Any, factors: Sequence[tuple[Any, Any]], c: Sequence[Any]) -> list[Any]:
        """Return c + the sum of a @ b over some a and b, of 16 x 16 and 16 x 8 numbers.

        The matrix unit adds toward zero, so what is summed there loses half a unit in the last place with each
        addition. Beside the rounding of 16-bit operands that is nothing. Where there are several factors, pieces of
        more exact operands, their sum begins at zero, and to c it is added outside of the matrix unit, to the nearest.

        Source: Ootomo and Yokota, arXiv:2203.03341, section III.
        """
        mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        places = (f"${index}" for index in itertools.count())
        take = lambda count: list(itertools.islice(places, count))
        listed = lambda names: f"{{{', '.join(names)}}}"
        made, operands, before = take(4), [(listed(take(4)), listed(take(2))) for _ in factors], take(4)
        given = [*(word for pair in factors for operand in pair for word in operand), *c]
        if len(factors) == 1:
            code = f"{mma} {listed(made)}, {', '.join(operands[0])}, {listed(before)};"
            numbers = [self.zero.type] * 4
            return list(_utils.inline_ptx(code, *given, result_types=numbers, convergent=True))
        # All in one: of additions that it sees LLVM moves the last ones past the end of a loop, which then carries both
        # numbers of each.
        total = [f"total{index}" for index in range(4)]
        starts = [["0f00000000"] * 4, *[total] * (len(factors) - 1)]
        products = [
            f"{mma} {listed(total)}, {a}, {b}, {listed(start)};" for (a, b), start in zip(operands, starts, strict=True)
        ]
        sums = [f"add.f32 {one}, {first}, {one};" for first, one in zip(before, total, strict=True)]
        return list(self.together([".reg .f32 total<4>;", *products, *sums], total, given, convergent=True))

    def copy_chunk(self, target: Any, source: Any, offsets: tuple[int, int], size: Any, condition: Any = None) -> None:
        """Begin to copy 16 bytes to shared memory: `size` from device memory, then zeros. `offsets` are to be added to
        both addresses; lanes for which a `condition` does not hold copy nothing and write nothing."""
        copy = f"cp.async.cg.shared.global [$0 + {offsets[0]}], [$1 + {offsets[1]}], 16, $2;"
        _utils.inline_ptx(copy, target, source, size, predicate=condition, has_side_effects=True)

    def copy_number(self, target: Any, source: Any, condition: Any) -> None:
        """Begin to copy a float32 number to shared memory, where a condition holds."""
        copy = "cp.async.ca.shared.global [$0], [$1], 4;"
        _utils.inline_ptx(copy, target, source, predicate=condition, has_side_effects=True)

    def load_words(self, address: Any, offset: int, count: int) -> list[Any]:
        """Return neighbouring words of device memory, whose address is a multiple of their bytes."""
        loaded = self.load(self.ir.VectorType.get((count,), self.type), self.arith.addi(address, self.long(offset)))
        return self.numbers(loaded)

    def store_chunk(self, address: Any, offset: int, words: Sequence[Any], condition: Any = None) -> None:
        """Store 16 bytes, as four words, in shared memory, where a condition holds."""
        store = f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
        _utils.inline_ptx(store, address, *words, predicate=condition, has_side_effects=True)

    def bits(self, number: Any) -> Any:
        """Return the bits of a float32."""
        return _utils.bitcast(number, self.type)

    def rounded_to(self, dtype: str, numbers: Sequence[Any]) -> Any:
        """Return the word of the bfloat16 or float16 numbers nearest to two float32 numbers, as `rounded` does."""
        if dtype == "bfloat16":
            return self.rounded(numbers)
        low, high = numbers
        return _utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result_types=self.type)

    def halves(self, word: Any) -> list[Any]:
        """Return the float32 values of a word's two numbers in half precision."""
        pair = _utils.bitcast(word, self.ir.VectorType.get((2,), self.ir.F16Type.get()))
        return [self.arith.extf(self.zero.type, number) for number in self.numbers(pair)]

    def load_word(self, address: Any, offset: int) -> Any:
        """Return a word of shared memory."""
        return self.bits(self.load_number(address, offset))

    def held(self, value: int) -> Any:
        """Return a constant that has a register. Of an instruction's two constants the compiler makes one each time."""
        hidden = "mov.u32 $0, %smid;\nshr.u32 $0, $0, 31;"
        return _utils.inline_ptx(f"{hidden}\nor.b32 $0, $0, {value};", result_types=self.type)

    def multiply_add(self, dtype: str, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once, of words of two bfloat16 or float16 numbers."""
        kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
        return _utils.inline_ptx(f"fma.rn.{kind} $0, $1, $2, $3;", a, b, c, result_types=self.type)

    def store_word(self, address: Any, offset: int, word: Any) -> None:
        """Store two numbers of 16 bits, or one of 32, in shared memory."""
        _utils.inline_ptx(f"st.shared.b32 [$0 + {offset}], $1;", address, word, has_side_effects=True)
