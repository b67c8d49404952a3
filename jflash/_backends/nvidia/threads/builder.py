"""The threads of a warpgroup in operations of MLIR: each has words of its own, and registers of tiles.

A tile `[64, columns]` lies in registers as Hopper's matrix unit leaves its products. Of every `eight` columns thread
`lane` of `warp` has two neighbours in row 16 warp + lane / 4, and two (`half` 1) in the row 8 below: those of columns
2 (lane % 4) + `k`, k < 2.

Sources: PTX ISA, red; wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS, LANES = 4, 32
THREADS = WARPS * LANES
TILE, SCALAR = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())


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

    @classmethod
    def emit(cls, make: Callable[..., Any], *arguments: Any, returns: Any = None, layout: Any = TILE) -> Any:
        """Return the arrays that `make(o, *arguments)` makes in a kernel, o being the builder of its instructions.

        Args:
          make: takes scalars as words, and other arrays as threads hold them; returns arrays as these, or nothing.
          arguments: references, scalars, arrays, tuples of arrays, or `None`.
          returns: the `array_type` of what `make` returns.
          layout: how threads hold arguments that are arrays.
        """
        given = tuple(jnp.int32(x) if isinstance(x, int) else x for x in arguments)
        layouts = lambda x: plgpu.RefType() if not isinstance(x, jax.Array) else layout if x.ndim else SCALAR

        def made(_: Any, *held: Any) -> Any:
            word = lambda x: x.registers.item() if isinstance(x, mgpu.FragmentedArray) and not x.shape else x
            return make(cls(), *map(word, held))

        emitted: Any = plgpu.inline_mgpu(arg_types=jax.tree.map(layouts, given), return_type=returns)(made)
        return emitted(*given)

    def __call__(self, value: int) -> Any:
        return mgpu.utils.c(value, self.type)

    @property
    def thread(self) -> Any:
        """The thread's index in its warpgroup."""
        return self.add(self.times(self.warp, 32), self.lane)

    @property
    def first_row(self) -> Any:
        """The upper of the thread's two rows of a tile."""
        return self.add(self.times(self.warp, 16), self.row)

    @property
    def first_column(self) -> Any:
        """The first of the thread's columns of a tile."""
        return self.times(self.pair, 2)

    def warp_place(self, columns: int, of_pair: int | None) -> tuple[Any, Any]:
        """Return a warp's first row and column in a block of `columns`, or in block `of_pair` (`products`)."""
        if of_pair is None:
            return self.times(self.warp, 16), self(0)
        first = self.add(self.times(self.right(self.warp, 1), 32), self(16 * of_pair))
        return first, self.times(self.arith.andi(self.warp, self(1)), columns)

    def long(self, value: int) -> Any:
        """Return a constant of 64 bits."""
        return mgpu.utils.c(value, self.long_type)

    def device_address(self, ref: Any) -> Any:
        """Return where a reference to device memory begins, in 64 bits."""
        return mgpu.utils.llvm.ptrtoint(self.long_type, mgpu.utils.memref_ptr(ref))

    def shared_address(self, ref: Any) -> Any:
        """Return where a reference to shared memory begins, in 32 bits."""
        return mgpu.utils.llvm.ptrtoint(self.type, mgpu.utils.memref_ptr(ref))

    def load(self, kind: Any, address: Any) -> Any:
        """Return what device memory has at an address: a number or a vector of MLIR's type `kind`."""
        utils: Any = mgpu.utils
        return utils.llvm.load(kind, utils.llvm.inttoptr(utils.llvm.PointerType.get(1), address))

    def shape(self, ref: Any) -> list[int]:
        """Return a reference's shape."""
        return self.ir.MemRefType(ref.type).shape

    def dtype(self, ref: Any) -> Any:
        """Return MLIR's type of a reference's numbers."""
        return self.ir.MemRefType(ref.type).element_type

    def opaque(self, word: Any) -> Any:
        """Return the word, of which the compiler does not know how it was made."""
        return mgpu.utils.inline_ptx("mov.b32 $0, $1;", word, result_types=self.type)

    def distance(self, index: Any, size: int) -> Any:
        """Return the bytes that `index` items of a size take, in 64 bits."""
        return self.arith.muli(self.arith.extsi(self.long_type, index), self.long(size))

    def times(self, number: Any, factor: int) -> Any:
        return self.arith.muli(number, self(factor))

    def either(self, *bits: Any) -> Any:
        return functools.reduce(self.arith.ori, bits)

    def add(self, *numbers: Any) -> Any:
        return functools.reduce(self.arith.addi, numbers)

    def float32(self, number: Any) -> Any:
        """Return the float32 nearest to a signed number."""
        return self.arith.sitofp(self.zero.type, number)

    def plus(self, number: Any, constant: float) -> Any:
        """Return the sum of a float32 and a constant."""
        return self.arith.addf(number, mgpu.utils.c(constant, self.zero.type))

    def left(self, bits: Any, by: Any) -> Any:
        return self.arith.shli(bits, self(by) if isinstance(by, int) else by)

    def right(self, bits: Any, by: Any) -> Any:
        return self.arith.shrui(bits, self(by) if isinstance(by, int) else by)

    def below(self, number: Any, limit: Any) -> Any:
        """Return whether a signed number is below another."""
        return self.arith.cmpi(self.arith.CmpIPredicate.slt, number, limit)

    def differ(self, word: Any, other: Any) -> Any:
        """Return whether two words differ."""
        return self.arith.cmpi(self.arith.CmpIPredicate.ne, word, other)

    def same(self, word: Any, other: Any) -> Any:
        """Return whether two words are the same."""
        return self.arith.cmpi(self.arith.CmpIPredicate.eq, word, other)

    @property
    def is_odd(self) -> Any:
        """Whether the thread is the second of two neighbours."""
        return self.differ(self.arith.andi(self.pair, self(1)), self(0))

    def of_neighbour(self, word: Any) -> Any:
        """Return the word of the thread beside this one: of two threads each has the other's."""
        return mgpu.utils.shfl_bfly(word, 1)

    def side_by_side(self, is_odd: Any, words: Sequence[Any]) -> list[Any]:
        """Return the first words of a thread and its neighbour if the thread is even, else their second words."""
        kept, given = (self.arith.select(is_odd, *two) for two in (words[::-1], words))
        taken = self.of_neighbour(given)
        return [self.arith.select(is_odd, *two) for two in ((taken, kept), (kept, taken))]

    def store_in_row(self, address: Any, offset: int, words: Sequence[Any], condition: Any) -> None:
        """Store two words side by side in device memory, where a condition holds."""
        store = f"st.global.v2.b32 [$0 + {offset}], {{$1, $2}};"
        mgpu.utils.inline_ptx(store, address, *words, predicate=condition, has_side_effects=True)

    def meet(self, warpgroups: int = 1) -> None:
        """Wait as the function `meet` does."""
        if warpgroups == 1:
            mgpu.warpgroup_barrier()
        else:
            mgpu.utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True)

    def load_in_row(self, address: Any, offset: int, condition: Any) -> Sequence[Any]:
        """Load two words side by side from device memory; 0 where a condition does not hold."""
        load = f"""{{ .reg .pred there; .reg .b32 first, second; setp.ne.b32 there, $3, 0;
        mov.b32 first, 0; mov.b32 second, 0; @there ld.global.v2.b32 {{first, second}}, [$2 + {offset}];
        mov.b32 $0, first; mov.b32 $1, second; }}"""
        there = self.arith.extui(self.type, condition)
        return mgpu.utils.inline_ptx(load, address, there, result_types=[self.type] * 2, has_side_effects=True)

    def add_numbers(self, address: Any, offset: int, numbers: Sequence[Any]) -> None:
        """Add neighbouring float32 numbers, one or four, to device memory."""
        names = ", ".join(f"${index}" for index in range(1, 1 + len(numbers)))
        kind, values = ("f32", names) if len(numbers) == 1 else (f"v{len(numbers)}.f32", f"{{{names}}}")
        add = f"red.relaxed.gpu.global.add.{kind} [$0 + {offset}], {values};"
        mgpu.utils.inline_ptx(add, address, *numbers, has_side_effects=True)

    def numbers(self, vector: Any) -> list[Any]:
        """Return the numbers of a register that holds several."""
        return [self.extract(vector, at) for at in range(self.ir.VectorType(vector.type).shape[0])]

    def extract(self, vector: Any, at: int) -> Any:
        """Return one of the numbers of a register that holds several."""
        return self.vector.extract(vector, [], self.ir.DenseI64ArrayAttr.get([at]))

    def vector_of(self, numbers: Sequence[Any]) -> Any:
        """Return a register that holds several numbers."""
        kind = self.ir.VectorType.get((len(numbers),), numbers[0].type)
        return self.vector.from_elements(kind, list(numbers))

    def words_of(self, tile: Any) -> list[Any]:
        """Return a tile's registers of two 16-bit numbers, as words."""
        return [mgpu.utils.bitcast(pair, self.type) for pair in tile.registers.flat]

    def change_where(
        self, change: str, comparison: str, word: Any, limit: int, numbers: Sequence[Any]
    ) -> Sequence[Any]:
        """Return two float32 numbers, each changed where a comparison holds of its half of a word, the lower half for
        the first: to 0 ("clear") or in its sign ("negate").

        A half is compared without its sign, as a number in half precision, with that of bits `limit`.
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
        """Return the float32 numbers that instructions, issued as one, make in registers `made` that they declare.

        They become results when all operands are read, since the compiler may give a result an operand's register.
        """
        results = [f"mov.f32 ${at}, {name};" for at, name in enumerate(made)]
        ptx = "\n".join(["{", *instructions, *results, "}"])
        types = [self.zero.type] * len(made)
        return mgpu.utils.inline_ptx(ptx, *operands, result_types=types, convergent=convergent)

    def rounded(self, numbers: Sequence[Any]) -> Any:
        """Return the word of the bfloat16 numbers nearest to two float32 numbers, the first one's in its lower half."""
        low, high = numbers
        return mgpu.utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=self.type)

    def number(self, bits: Any) -> Any:
        """Return the float32 of these bits."""
        return mgpu.utils.bitcast(bits, self.zero.type)


def as_tree(operation: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    """Return an operation between all values, as a tree: in a chain each would wait for the one before."""
    some = list(values)
    while len(some) > 1:
        some = [*map(operation, some[::2], some[1::2]), *some[len(some) // 2 * 2 :]]
    return some[0]


def strided(shape: Sequence[int], most: int = 4) -> Any:
    """Return the layout in which each thread has neighbours in the order of rows, as many as divide, up to `most`."""
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=math.gcd(most, math.prod(shape) // THREADS))


def array_type(shape: Sequence[int], dtype: Any, layout: Any = TILE) -> Any:
    """Return the type of an array that `ThreadBuilder.emit` returns."""
    return plgpu.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), layout=layout)


def places(columns: int) -> Iterator[tuple[int, int]]:
    """Yield `eight` and `half` of a tile's registers, in their order."""
    return itertools.product(range(columns // 8), range(2))


def tile(shape: Sequence[int], registers: Iterable[Any], *, is_signed: bool | None = None) -> Any:
    """Return the tile that has these registers, in the order of `places`.

    `is_signed` says it of integers, is False for booleans, and None for floating-point numbers.
    """
    array = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(tuple(shape)), dtype=object)
    for place, register in zip(np.ndindex(array.shape), registers, strict=True):
        array[place] = register
    return mgpu.FragmentedArray(_registers=array, _layout=mgpu.WGMMA_LAYOUT, _is_signed=is_signed)


def by_thread(o: ThreadBuilder, word: Any) -> Any:
    """Return the vector `[128]` of integers of which each thread has a word."""
    registers = np.empty((1,), dtype=object)
    registers[0] = o.vector_of([word])
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGStridedFragLayout((THREADS,), 1), _is_signed=True)


def scalar(word: Any, *, is_signed: bool = True) -> Any:
    """Return the array without axes that is a word, the same in all threads of a warp at least."""
    return mgpu.FragmentedArray.splat(word, (), is_signed=is_signed)


def meet(warpgroups: int = 1) -> None:
    """Wait until all threads of the CTA, which has `warpgroups`, are here, and see what they wrote to shared memory."""
    ThreadBuilder.emit(lambda o: o.meet(warpgroups))
