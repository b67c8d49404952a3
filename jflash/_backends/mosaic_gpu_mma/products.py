"""Products by `mma.sync.m16n8k16`: a warpgroup's accumulators in registers, B and sometimes A in shared memory.

Each warp makes 16 rows of every 64. What a lane holds of an accumulator, of 16 rows and 8 columns, are two neighbours
of row lane / 4 and of the row 8 below: for a warpgroup that is the layout of wgmma's accumulators,
`plgpu.Layout.WGMMA`. Two of them side by side, rounded to 16 bits, are a fragment of A: so P is an operand as it is.

B's fragments come from `ldmatrix`, two of 8 columns at once, and serve all 64-row blocks. What a multiprocessor reads
from shared memory for them takes longer than the products of one block, and less than those of two; so does what it
reads for A, unless A is held in registers.

Where A is in shared memory and has 64 rows alone, two blocks can be had of half of the columns: a pair. Of its first
block warp w has the rows 32 (w / 2) to 32 (w / 2) + 15, of the second the 16 that follow; and of the columns the first
half if w is even, else the second.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK, SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS

Tiles = tuple[Float[Array, "64 columns"], ...]
Operand = tuple[Tiles, ...] | Ref
"""A: in registers, of each piece its blocks of 64 rows; or in shared memory `[rows, K]`, or `[pieces, rows, K]`."""

STEP = 16
"""What an instruction takes of K; and the columns of B that are read at once."""
STEPS_OF_PIECES = 2
"""Steps in K whose products of pieces are one sum. With one, there are twice as many additions, which the
compiler puts off until registers are spilled; with four, what is read takes more registers than are left."""

_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())
_utils: Any = mgpu.utils


def can_pair(columns: int) -> bool:
    """Whether a pair of blocks may have the columns of a tile of B: each half of them whole panels, or half of one."""
    panel, half = SmemTile(16, columns).chunks * CHUNK, columns // 2
    return half % 16 == 0 and (half % panel == 0 or 2 * half == panel)


def add_product(
    acc: Tiles,
    a: Operand,
    b: Ref,
    order: Sequence[tuple[int, int]],
    *,
    transposed: bool,
    first_row: Any = None,
    a_transposed: bool = False,
    paired: bool = False,
    steps: Sequence[int] | None = None,
    first_column: int = 0,
) -> Tiles:
    """acc + a @ b, or with `transposed` acc + a @ b.T.

    Args:
      acc: blocks of 64 rows, in float32.
      a: the same rows; in registers perhaps those columns alone that belong to `steps`.
      b: in shared memory, `[K, columns]`, or `[columns, K]` if transposed; or with an axis of pieces before.
      order: which pieces of a and of b are multiplied, in the order in which their products are added.
      transposed: whether it is b's transpose that `a` is multiplied with.
      first_row: a multiple of 16, from which on the rows of b count; `None` if it is 0.
      a_transposed: whether `a` is `[K, rows]`, in shared memory.
      paired: whether `acc` is a pair.
      steps: of the steps of 16 in K those that are taken, if not all.
      first_column: a multiple of 16, of each half of b's columns in a pair, from which on those of `acc` count.
    """
    in_registers = isinstance(a, tuple)
    first_step = steps[0] if in_registers and steps is not None and a[0][0].shape[1] == STEP * len(steps) else 0
    layouts = (_LAYOUT,) * len(acc)
    given = [] if first_row is None else [jnp.int32(first_row)]

    @plgpu.inline_mgpu(
        arg_types=(
            layouts,
            (layouts,) * len(a) if in_registers else plgpu.RefType(),
            plgpu.RefType(),
            *[_SCALAR] * len(given),
        ),
        return_type=_results([one.shape for one in acc], jnp.float32),
    )
    def made(_: Any, acc: Any, a: Any, b: Any, *first: Any) -> Any:
        o = Lanes()
        left: Sequence[RegisterOperand | LeftOperand | TransposedOperand]
        if in_registers:
            left = [RegisterOperand(list(map(words, tiles)), first_step) for tiles in a]
        else:
            tile, base, pieces = _place(o, a)
            left = (TransposedOperand if a_transposed else LeftOperand)(o, tile, base, paired=paired).pieces(pieces)
        sums = [[o.numbers(pair) for pair in block.registers.flat] for block in acc]
        dtype = _utils.ir.MemRefType(b.type).element_type
        (tile, base, pieces), first_row = _place(o, b), first[0].registers.item() if first else None
        base = base if first_row is None else o.add(base, o.times(first_row, tile.pitch))
        right = (PairedColumns(o, tile, base) if paired else SmemOperand(o, tile, base)).pieces(pieces)
        some: dict[str, Any] = dict(steps=steps, first_column=first_column)
        multiply(o, dtype, sums, left, right, order, transposed=transposed, **some)
        return tuple(_array(o, block.shape, o.zero.type, of_block) for block, of_block in zip(acc, sums, strict=True))

    call: Any = made
    return call(acc, a, b, *given)


def load_rows(
    ref: Ref, *, columns: int | None = None, transposed: bool = False, paired: bool = False
) -> tuple[Tiles, ...]:
    """Rows of A from shared memory, or the first `columns` of them: of each piece its blocks of 64, or a pair.

    With `transposed` it is ref's transpose whose rows they are.
    """
    *pieces, rows, depth = ref.shape
    if transposed:
        rows, depth = depth, rows
    width: int = depth if columns is None else columns
    blocks = 2 if paired else rows // WARPGROUP_ROWS
    kind = TransposedOperand if transposed else LeftOperand
    shapes = [(WARPGROUP_ROWS, width)] * blocks * math.prod(pieces)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_results(shapes, ref.dtype))
    def loaded(_: Any, ref: Any) -> Any:
        o = Lanes()
        (tile, base, count), dtype = _place(o, ref), _utils.ir.MemRefType(ref.type).element_type
        operands = kind(o, tile, base, paired=paired).pieces(count)
        pair = _utils.ir.VectorType.get((2,), dtype)

        def block(operand: LeftOperand | TransposedOperand, number: int) -> Any:
            words = [word for index in range(width // STEP) for word in operand.fragment(number, index)]
            pairs = [o.numbers(_utils.bitcast(word, pair)) for word in words]
            return _array(o, (WARPGROUP_ROWS, width), dtype, pairs)

        return tuple(block(operand, number) for operand in operands for number in range(blocks))

    call: Any = loaded
    return tuple(itertools.batched(call(ref), blocks))


def scaled_pair(pair: Tiles, factors: Ref) -> Tiles:
    """A pair of blocks, each of its 64 rows times its own number in shared memory."""
    results = _results([one.shape for one in pair], jnp.float32)

    @plgpu.inline_mgpu(arg_types=((_LAYOUT,) * len(pair), plgpu.RefType()), return_type=results)
    def scaled(_: Any, pair: Any, factors: Any) -> Any:
        o = Lanes()
        own = row_numbers(o, o.shared_address(factors))
        times = lambda two, factor: [o.arith.mulf(number, factor) for number in o.numbers(two)]
        return tuple(
            _array(
                o, block.shape, o.zero.type, [times(*both) for both in zip(block.registers.flat, itertools.cycle(of))]
            )
            for block, of in zip(pair, own, strict=True)
        )

    call: Any = scaled
    return call(pair, factors)


def row_numbers(o: Lanes, base: Any) -> list[list[Any]]:
    """Of 64 float32 numbers in shared memory, for both blocks of a pair those of a lane's upper and lower row."""
    address = o.add(base, o.times(o.add(own_place(o, 0, 0)[0], o.row), 4))
    return [[o.load_number(address, 4 * (16 * number + 8 * half)) for half in range(2)] for number in range(2)]


def own_place(o: Lanes, columns: int, of_pair: int | None) -> tuple[Any, Any]:
    """The first row and column of a lane's warp in a block, or in block `of_pair` of a pair, each with `columns`."""
    if of_pair is None:
        return o.times(o.warp, 16), o(0)
    first = o.add(o.times(o.right(o.warp, 1), 32), o(16 * of_pair))
    return first, o.times(o.arith.andi(o.warp, o(1)), columns)


class RegisterOperand:
    """Rows of A that a warpgroup holds in the layout of accumulators: words of two numbers."""

    def __init__(self, blocks: Sequence[Sequence[Any]], first: int = 0) -> None:
        """The rows' columns begin with those of step `first`."""
        self.blocks, self.depth, self.first = blocks, 4 * len(blocks[0]), first

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """The four words of 16 columns of a block of 64 rows."""
        place = 4 * (index - self.first)
        return self.blocks[block][place : place + 4]


class SmemOperand:
    """A tile in shared memory."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, first_chunk: Any = None) -> None:
        """`first_chunk` is that of the lane's warp, if it has chunks of its own in a panel."""
        self.o, self.tile, self.base, self.first_chunk = o, tile, base, first_chunk
        self.addresses: dict[tuple[int, bool], Any] = {}
        self.offset = 0

    def pieces(self, number: int) -> list[Self]:
        """`number` tiles, this one and those that lie behind it, which share its addresses."""
        every = [copy.copy(self) for _ in range(number)]
        for place, one in enumerate(every):
            one.offset = place * self.tile.bytes
        return every

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        """Four 8 x 8 matrices, which make 16 rows, from `row` on, of two chunks; in the order of rows, both chunks of
        each eight, or with `rows_first` in that of chunks."""
        address, offset = self._address(chunk, rows_first), self.tile.place(row, chunk)
        return self.o.load_matrices(address, self.offset + offset, transpose=transpose)

    def _address(self, chunk: int, rows_first: bool) -> Any:
        """Where a lane's row of the matrices begins, but for what is the same for all lanes."""
        key = chunk % self.tile.chunks, rows_first
        if key in self.addresses:
            return self.addresses[key]
        o = self.o
        if key[0] > 0:
            # Rows of a panel begin at multiples of their bytes. One instruction from one address, which the compiler
            # repeats where registers are short.
            self.addresses[key] = o.arith.xori(self._address(0, rows_first), o(16 * key[0]))
        else:
            row, matrix = o.arith.andi(o.lane, o(7)), o.right(o.lane, 3)
            low, high = o.arith.andi(matrix, o(1)), o.right(matrix, 1)
            below, beside = (low, high) if rows_first else (high, low)
            own_row, own_chunk = o.add(row, o.left(below, 3)), beside
            if self.first_chunk is not None:
                own_chunk = o.arith.ori(own_chunk, self.first_chunk)
            places = o.times(own_row, self.tile.pitch), self.tile.permuted(o, row, own_chunk)
            self.addresses[key] = o.add(self.base, *places)
        return self.addresses[key]


class LeftOperand(SmemOperand):
    """A tile `[rows, K]` as A, of which each warp reads its own rows: 16 of every 64, or if `paired` 32 of 64."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        own = o.times(o.right(o.warp, 1), 32 * tile.pitch) if paired else o.times(o.warp, 16 * tile.pitch)
        super().__init__(o, tile, o.add(base, own))
        self.rows, self.depth = 16 if paired else WARPGROUP_ROWS, tile.columns

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """The four words of 16 columns of a block."""
        return self.matrices(block * self.rows, 2 * index, rows_first=True, transpose=False)


class TransposedOperand(SmemOperand):
    """A tile `[K, rows]` as A, likewise; its panels have 64 columns."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        super().__init__(o, tile, base, o.times(o.right(o.warp, 1), 4) if paired else o.times(o.warp, 2))
        self.chunks, self.depth = (16 if paired else WARPGROUP_ROWS) // CHUNK, tile.rows

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """The four words of 16 rows of a block."""
        return self.matrices(16 * index, block * self.chunks, rows_first=False, transpose=True)


class PairedColumns(SmemOperand):
    """A tile `[K, columns]` as B, of which each warp reads half of the columns."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any) -> None:
        odd, half = o.arith.andi(o.warp, o(1)), tile.columns // CHUNK // 2
        if half < tile.chunks:
            super().__init__(o, tile, base, o.times(odd, half))
        else:
            super().__init__(o, tile, o.add(base, o.times(odd, tile.place(0, half))))


def multiply(
    o: Lanes,
    dtype: Any,
    sums: Sequence[list[Any]],
    left: Sequence[RegisterOperand | LeftOperand | TransposedOperand],
    right: Sequence[SmemOperand],
    order: Sequence[tuple[int, int]],
    *,
    transposed: bool,
    steps: Sequence[int] | None = None,
    first_column: int = 0,
) -> None:
    """Add a product to each block's sums, a list of pairs of neighbours in the order of an accumulator's registers.

    Of operands in pieces, all products of a few steps of K are one sum, which is added to the others
    (`Lanes.multiply`): so what is read of each piece serves them all. `steps` and `first_column` are as for
    `add_product`.
    """
    columns, every = 4 * len(sums[0]), range(left[0].depth // STEP) if steps is None else steps
    for together in itertools.batched(every, STEPS_OF_PIECES if len(order) > 1 else 1):
        fragments = [[[one.fragment(block, k) for one in left] for k in together] for block in range(len(sums))]
        for n in range(columns // 16):
            first = first_column + 16 * n
            places = [(first, 2 * k) if transposed else (16 * k, first // CHUNK) for k in together]
            turned = dict(rows_first=not transposed, transpose=not transposed)
            words = [[one.matrices(*place, **turned) for one in right] for place in places]
            for eight in range(2):
                at, own = 4 * n + 2 * eight, slice(2 * eight, 2 * eight + 2)
                for block, of_block in zip(sums, fragments, strict=True):
                    both = list(zip(of_block, words, strict=True))
                    factors = [(a[of_a], b[of_b][own]) for of_a, of_b in order for a, b in both]
                    made = o.multiply(dtype, factors, [*block[at], *block[at + 1]])
                    block[at : at + 2] = made[:2], made[2:]


def _place(o: Lanes, ref: Any) -> tuple[SmemTile, Any, int]:
    """A tile in shared memory, or the first of its pieces; where it begins; and how many pieces there are."""
    base = o.shared_address(ref)
    *pieces, rows, columns = _utils.ir.MemRefType(ref.type).shape
    return SmemTile(rows, columns), base, math.prod(pieces)


def _results(shapes: Sequence[tuple[int, ...]], dtype: Any) -> tuple[Any, ...]:
    return tuple(plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=_LAYOUT) for shape in shapes)


def words(block: Any) -> list[Any]:
    """A tile's registers in their order, of two neighbours each, as words."""
    word = _utils.ir.IntegerType.get_signless(32)
    return [_utils.bitcast(pair, word) for pair in block.registers.flat]


def _array(o: Lanes, shape: tuple[int, ...], dtype: Any, pairs: Sequence[Sequence[Any]]) -> Any:
    pair_type, registers = _utils.ir.VectorType.get((2,), dtype), np.empty(len(pairs), dtype=object)
    for index, pair in enumerate(pairs):
        registers[index] = o.vector.from_elements(pair_type, list(pair))
    registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
