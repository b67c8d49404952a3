"""The threads of a warpgroup, each with words of its own, in operations of MLIR.

Source: PTX ISA, red, and of the layout wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

THREADS = 128


class ThreadBuilder:
    """A 32-bit word of each thread, and the instructions on it."""

    def __init__(self) -> None:
        utils: Any = mgpu.utils
        self.ir, self.arith, self.vector = utils.ir, utils.arith, utils.vector
        self.type, self.long_type = map(utils.ir.IntegerType.get_signless, (32, 64))
        self.zero = utils.c(0.0, utils.ir.F32Type.get())
        """A float32."""
        thread = self.arith.remui(utils.thread_idx(), self(THREADS))
        self.warp, self.lane = self.arith.divui(thread, self(32)), self.arith.remui(thread, self(32))
        self.row, self.pair = self.arith.divui(self.lane, self(4)), self.arith.remui(self.lane, self(4))

    def __call__(self, value: int) -> Any:
        return mgpu.utils.c(value, self.type)

    def long(self, value: int) -> Any:
        """A constant of 64 bits."""
        return mgpu.utils.c(value, self.long_type)

    def device_address(self, ref: Any) -> Any:
        """Where a reference to device memory begins, in 64 bits."""
        return mgpu.utils.llvm.ptrtoint(self.long_type, mgpu.utils.memref_ptr(ref))

    def shared_address(self, ref: Any) -> Any:
        """Where a reference to shared memory begins, in 32 bits."""
        return mgpu.utils.llvm.ptrtoint(self.type, mgpu.utils.memref_ptr(ref))

    def opaque(self, word: Any) -> Any:
        """The word, of which the compiler does not know how it was made."""
        return mgpu.utils.inline_ptx("mov.b32 $0, $1;", word, result_types=self.type)

    def distance(self, index: Any, size: int) -> Any:
        """The bytes that `index` items of a size take, in 64 bits."""
        return self.arith.muli(self.arith.extsi(self.long_type, index), self.long(size))

    def times(self, number: Any, factor: int) -> Any:
        return self.arith.muli(number, self(factor))

    def either(self, *bits: Any) -> Any:
        return functools.reduce(self.arith.ori, bits)

    def add(self, *numbers: Any) -> Any:
        return functools.reduce(self.arith.addi, numbers)

    def subtract(self, number: Any, other: Any) -> Any:
        return self.arith.subi(number, other)

    def float32(self, number: Any) -> Any:
        """The float32 nearest to a signed number."""
        return self.arith.sitofp(self.zero.type, number)

    def plus(self, number: Any, constant: float) -> Any:
        """A float32 and a constant."""
        return self.arith.addf(number, mgpu.utils.c(constant, self.zero.type))

    def left(self, bits: Any, by: Any) -> Any:
        return self.arith.shli(bits, self(by) if isinstance(by, int) else by)

    def right(self, bits: Any, by: Any) -> Any:
        return self.arith.shrui(bits, self(by) if isinstance(by, int) else by)

    def below(self, number: Any, limit: Any) -> Any:
        """Whether a signed number is below another."""
        return self.arith.cmpi(self.arith.CmpIPredicate.slt, number, limit)

    def of_neighbour(self, word: Any) -> Any:
        """The word of the thread beside this one: of two threads each has the other's."""
        return mgpu.utils.shfl_bfly(word, 1)

    def side_by_side(self, is_odd: Any, words: Sequence[Any]) -> list[Any]:
        """Of a thread's two words and its neighbour's: the first one of each if the thread is even, else the second."""
        kept, given = (self.arith.select(is_odd, *two) for two in (words[::-1], words))
        taken = self.of_neighbour(given)
        return [self.arith.select(is_odd, *two) for two in ((taken, kept), (kept, taken))]

    def add_numbers(self, address: Any, offset: int, numbers: Sequence[Any]) -> None:
        """Add neighbouring float32 numbers, one or four, to device memory."""
        names = ", ".join(f"${index}" for index in range(1, 1 + len(numbers)))
        kind, values = ("f32", names) if len(numbers) == 1 else (f"v{len(numbers)}.f32", f"{{{names}}}")
        add = f"red.relaxed.gpu.global.add.{kind} [$0 + {offset}], {values};"
        mgpu.utils.inline_ptx(add, address, *numbers, has_side_effects=True)

    def numbers(self, pair: Any) -> list[Any]:
        """The two numbers of a register that holds two."""
        return [self.vector.extract(pair, [], self.ir.DenseI64ArrayAttr.get([at])) for at in range(2)]

    def pair_of(self, numbers: Sequence[Any]) -> Any:
        """A register that holds two numbers."""
        return self.vector.from_elements(self.ir.VectorType.get((2,), numbers[0].type), list(numbers))

    def change_where(
        self, change: str, comparison: str, word: Any, limit: int, numbers: Sequence[Any]
    ) -> Sequence[Any]:
        """Two float32 numbers, each changed, to 0 or ("negate") in its sign, where a comparison holds of its half of a
        word, the lower half for the first: without its sign, as a number in half precision, with that of bits `limit`.
        """
        instruction = {"clear": "mul.f32 {0}, {0}, 0f00000000;", "negate": "neg.f32 {0}, {0};"}[change]
        both = ("first", "second")
        copied = [f"mov.f32 {name}, ${at};" for at, name in enumerate(both, start=2)]
        compared = ["abs.f16x2 size, $4;", f"setp.{comparison}.f16x2 low|high, size, $5;"]
        changed = [f"@{half} {instruction.format(name)}" for half, name in zip(("low", "high"), both, strict=True)]
        registers = [".reg .pred low, high;", ".reg .b32 size;", ".reg .f32 first, second;"]
        operands = *numbers, word, self(limit | limit << 16)
        return self.together([*registers, *copied, *compared, *changed], both, operands)

    def together(
        self, instructions: Sequence[str], made: Sequence[str], operands: Sequence[Any], *, convergent: bool = False
    ) -> Sequence[Any]:
        """Several instructions in one, which make float32 numbers in registers `made` that they declare.

        They become results when all operands are read, since the compiler may give a result an operand's register.
        """
        results = [f"mov.f32 ${at}, {name};" for at, name in enumerate(made)]
        ptx = "\n".join(["{", *instructions, *results, "}"])
        types = [self.zero.type] * len(made)
        return mgpu.utils.inline_ptx(ptx, *operands, result_types=types, convergent=convergent)

    def rounded(self, numbers: Sequence[Any]) -> Any:
        """The word of the bfloat16 numbers nearest to two float32 numbers, the first one's in its lower half."""
        low, high = numbers
        return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=self.type)

    def bfloat16(self, word: Any) -> Any:
        """A register that holds two numbers, from their word."""
        return mgpu.utils.bitcast(word, self.ir.VectorType.get((2,), self.ir.BF16Type.get()))

    def bits(self, number: Any) -> Any:
        """Those of a float32."""
        return mgpu.utils.bitcast(number, self.type)

    def number(self, bits: Any) -> Any:
        """The float32 that has them."""
        return mgpu.utils.bitcast(bits, self.zero.type)

    def fields(self, bits: Any, *fields: tuple[int, int]) -> Any:
        """Masked fields of bits, each shifted right by its own amount, or-ed together."""
        return self.either(*(self.arith.andi(self.right(bits, by), self(field)) for field, by in fields))

    def own(self, bits: Any) -> Any:
        """Each byte shifted right, so that its lowest two bits belong to this thread's columns."""
        return self.right(bits, self.left(self.pair, 1))


def as_tree(operation: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    """An operation between all values, as a tree: in a chain each would wait for the one before."""
    some = list(values)
    while len(some) > 1:
        some = [*map(operation, some[::2], some[1::2]), *some[len(some) // 2 * 2 :]]
    return some[0]


def make_tile(
    shape: tuple[int, ...],
    dtype: Any,
    first: Int[Array, ""],
    words: Callable[[], ThreadBuilder],
    own: Callable[[Any, Any], Callable[[int, int, int], Any]],
) -> Array:
    """A tile of 64 rows that each thread makes of a scalar.

    Args:
      shape, dtype: of the tile; float32 or int32.
      first: the scalar.
      words: makes the thread's operations.
      own: of these and the scalar makes what gives the thread's elements, by the columns from 8 `eight` on, the upper
        (half 0) or lower row, and which of the two columns.
    """
    return_type = plgpu.ShapeDtypeStruct(shape, np.dtype(dtype), layout=plgpu.Layout.WGMMA)
    is_signed = True if np.issubdtype(dtype, np.integer) else None

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),), return_type=return_type)
    def made(_: Any, first: Any) -> Any:
        o = words()
        element = own(o, first.registers.item())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            registers[index] = o.pair_of([element(eight, half, k) for k in range(2)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=is_signed)

    call: Any = made
    return call(first)
