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
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import CHUNK, SmemTile
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import array_type, tile

Tiles = tuple[Float[Array, "64 columns"], ...]
Operand = tuple[Tiles, ...] | Ref
"""A: in registers, of each piece its blocks of 64 rows; in shared memory `[rows, K]`, or `[pieces, rows, K]`; or
`Transposed`."""

STEP = 16
"""What an instruction takes of K; and the columns of B that are read at once."""
STEPS_OF_PIECES = 2
"""Steps in K whose products of pieces are one sum. With one, there are twice as many additions, which the
compiler puts off until registers are spilled; with four, what is read takes more registers than are left."""

_utils: Any = mgpu.utils


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A as a tile `[K, rows]`, or `[pieces, K, rows]`, in shared memory."""

    ref: Ref


class Chosen(NamedTuple):
    """What is multiplied of two operands."""

    order: Sequence[tuple[int, int]]
    """The pairs of a piece of A and a piece of B, in the order in which their products are added."""
    transposed: bool = False
    """Whether it is the transpose of a tile `[columns, K]` that is B."""
    steps: Sequence[int] | None = None
    """The steps of 16 in K that are taken, if not all."""
    first_column: int = 0
    """The column of B, or of each half of a pair's, from which on they count; a multiple of 16."""


def can_pair(columns: int) -> bool:
    """Return whether a pair of blocks may have a tile of B: halves of its columns are whole panels, or of one panel."""
    panel, half = SmemTile(16, columns).chunks * CHUNK, columns // 2
    return half % 16 == 0 and (half % panel == 0 or 2 * half == panel)


def add_product(
    acc: Tiles, a: Operand, b: Ref, chosen: Chosen, *, first_row: Any = None, paired: bool = False
) -> Tiles:
    """Return acc + a @ b, or acc + a @ b.T.

    Args:
      acc: blocks of 64 rows, in float32, of all columns or of those that are chosen.
      a: the same rows; in registers perhaps only as many columns as the chosen steps reach.
      b: in shared memory, `[K, columns]`, or `[columns, K]` if transposed; or with an axis of pieces before.
      chosen: what is multiplied of both.
      first_row: a multiple of 16, from which on the rows of b count; `None` if it is 0.
      paired: whether the blocks are a pair, each of half of the columns.
    """
    kind = TransposedOperand if isinstance(a, Transposed) else LeftOperand

    def make(o: Lanes, acc: Any, a: Any, b: Any, first_row: Any) -> Any:
        left: Sequence[Left]
        if isinstance(a, tuple):
            left = [RegisterOperand(list(map(o.words_of, tiles))) for tiles in a]
        else:
            left = _operands(o, a, lambda *place: kind(o, *place, paired=paired))
        sums = [list(map(o.numbers, block.registers.flat)) for block in acc]

        def right_operand(tile: SmemTile, base: Any) -> SmemOperand:
            base = base if first_row is None else o.add(base, o.times(first_row, tile.pitch))
            return (PairedColumns if paired else SmemOperand)(o, tile, base)

        multiply(o, o.dtype(b), sums, left, _operands(o, b, right_operand), chosen)
        return tuple(tile(block.shape, map(o.vector_of, pairs)) for block, pairs in zip(acc, sums, strict=True))

    returns = tuple(array_type(one.shape, jnp.float32) for one in acc)
    return Lanes.emit(make, acc, a.ref if isinstance(a, Transposed) else a, b, first_row, returns=returns)


def load_rows(
    ref: Ref, *, columns: int | None = None, transposed: bool = False, paired: bool = False
) -> tuple[Tiles, ...]:
    """Return rows of A from shared memory, or the first `columns` of them: of each piece its blocks of 64, or a pair.

    With `transposed` it is ref's transpose whose rows they are.
    """
    *pieces, rows, depth = ref.shape
    if transposed:
        rows, depth = depth, rows
    shape = WARPGROUP_ROWS, depth if columns is None else columns
    blocks = 2 if paired else rows // WARPGROUP_ROWS
    kind = TransposedOperand if transposed else LeftOperand

    def make(o: Lanes, ref: Any) -> Any:
        pair = _utils.ir.VectorType.get((2,), o.dtype(ref))

        def block(operand: LeftOperand | TransposedOperand, number: int) -> Any:
            words = [word for index in range(shape[1] // STEP) for word in operand.fragment(number, index)]
            pairs = [o.numbers(_utils.bitcast(word, pair)) for word in words]
            return tile(shape, map(o.vector_of, pairs))

        operands = _operands(o, ref, lambda *place: kind(o, *place, paired=paired))
        return tuple(block(operand, number) for operand in operands for number in range(blocks))

    returns = (array_type(shape, ref.dtype),) * (blocks * math.prod(pieces))
    return tuple(itertools.batched(Lanes.emit(make, ref, returns=returns), blocks))


def scaled_pair(pair: Tiles, factors: Ref) -> Tiles:
    """Return a pair of blocks, each of its 64 rows times its own number in shared memory."""

    def make(o: Lanes, pair: Any, factors: Any) -> Any:
        def block(values: Any, factors: Sequence[Any]) -> Any:
            both = zip(values.registers.flat, itertools.cycle(factors))
            products = [[o.arith.mulf(x, factor) for x in o.numbers(two)] for two, factor in both]
            return tile(values.shape, map(o.vector_of, products))

        return tuple(map(block, pair, row_numbers(o, o.shared_address(factors))))

    return Lanes.emit(make, pair, factors, returns=tuple(array_type(one.shape, jnp.float32) for one in pair))


def row_numbers(o: Lanes, base: Any) -> list[list[Any]]:
    """Return for both blocks of a pair the numbers of a lane's upper and lower row, of 64 in shared memory."""
    address = o.add(base, o.times(o.add(o.warp_place(0, 0)[0], o.row), 4))
    return [[o.load_number(address, 4 * (16 * number + 8 * half)) for half in range(2)] for number in range(2)]


class RegisterOperand:
    """Rows of A that a warpgroup holds in the layout of accumulators, as words of two numbers."""

    def __init__(self, blocks: Sequence[Sequence[Any]]) -> None:
        self.blocks, self.depth = blocks, 4 * len(blocks[0])

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Return the four words of 16 columns of a block of 64 rows."""
        return self.blocks[block][4 * index : 4 * index + 4]


class SmemOperand:
    """A tile in shared memory."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, first_chunk: Any = None) -> None:
        """`first_chunk` is that of the lane's warp, if it has chunks of its own in a panel."""
        self.o, self.tile, self.base, self.first_chunk = o, tile, base, first_chunk
        self.addresses: dict[tuple[int, bool], Any] = {}
        self.offset = 0

    def pieces(self, number: int) -> list[Self]:
        """Return `number` tiles: this one and those that lie behind it, which share its addresses."""
        every = [copy.copy(self) for _ in range(number)]
        for place, one in enumerate(every):
            one.offset = place * self.tile.bytes
        return every

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        """Return four 8 x 8 matrices, which are 16 rows, from `row` on, of two chunks.

        They come in the order of rows, both chunks of each eight, or with `rows_first` in that of chunks.
        """
        address, offset = self._address(chunk, rows_first), self.tile.place(row, chunk)
        return self.o.load_matrices(address, self.offset + offset, transpose=transpose)

    def _address(self, chunk: int, rows_first: bool) -> Any:
        """Return where a lane's row of the matrices begins, but for what is the same for all lanes."""
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
            lane_row, chunk = o.add(row, o.left(below, 3)), beside
            if self.first_chunk is not None:
                chunk = o.arith.ori(chunk, self.first_chunk)
            places = o.times(lane_row, self.tile.pitch), self.tile.permuted(o, row, chunk)
            self.addresses[key] = o.add(self.base, *places)
        return self.addresses[key]


class LeftOperand(SmemOperand):
    """A tile `[rows, K]` as A, of which each warp reads its own rows: 16 of every 64, or if `paired` 32 of 64."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        first_row = o.times(o.right(o.warp, 1), 32 * tile.pitch) if paired else o.times(o.warp, 16 * tile.pitch)
        super().__init__(o, tile, o.add(base, first_row))
        self.rows, self.depth = 16 if paired else WARPGROUP_ROWS, tile.columns

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Return the four words of 16 columns of a block."""
        return self.matrices(block * self.rows, 2 * index, rows_first=True, transpose=False)


class TransposedOperand(SmemOperand):
    """A tile `[K, rows]` as A, in panels of 64 columns; each warp reads the rows that it reads of a `LeftOperand`."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, paired: bool = False) -> None:
        super().__init__(o, tile, base, o.times(o.right(o.warp, 1), 4) if paired else o.times(o.warp, 2))
        self.chunks, self.depth = (16 if paired else WARPGROUP_ROWS) // CHUNK, tile.rows

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Return the four words of 16 rows of a block."""
        return self.matrices(16 * index, block * self.chunks, rows_first=False, transpose=True)


class PairedColumns(SmemOperand):
    """A tile `[K, columns]` as B, of which each warp reads half of the columns."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any) -> None:
        odd, half = o.arith.andi(o.warp, o(1)), tile.columns // CHUNK // 2
        if half < tile.chunks:
            super().__init__(o, tile, base, o.times(odd, half))
        else:
            super().__init__(o, tile, o.add(base, o.times(odd, tile.place(0, half))))


Left = RegisterOperand | LeftOperand | TransposedOperand


def multiply(
    o: Lanes,
    dtype: Any,
    sums: Sequence[list[Any]],
    left: Sequence[Left],
    right: Sequence[SmemOperand],
    chosen: Chosen,
) -> None:
    """Add a product to each block's sums, a list of pairs of neighbours in the order of an accumulator's registers.

    Of operands in pieces, all products of a few steps of K are one sum, which is added to the others
    (`Lanes.multiply`): so what is read of each piece serves them all.
    """
    order, transposed, steps, first_column = chosen
    columns, every = 4 * len(sums[0]), range(left[0].depth // STEP) if steps is None else steps
    for together in itertools.batched(every, STEPS_OF_PIECES if len(order) > 1 else 1):
        fragments = [[[one.fragment(block, k) for one in left] for k in together] for block in range(len(sums))]
        for n in range(columns // 16):
            first = first_column + 16 * n
            places = [(first, 2 * k) if transposed else (16 * k, first // CHUNK) for k in together]
            turned = dict(rows_first=not transposed, transpose=not transposed)
            words = [[one.matrices(*place, **turned) for one in right] for place in places]
            for eight in range(2):
                at, half = 4 * n + 2 * eight, slice(2 * eight, 2 * eight + 2)
                for block, of_block in zip(sums, fragments, strict=True):
                    both = list(zip(of_block, words, strict=True))
                    factors = [(a[of_a], b[of_b][half]) for of_a, of_b in order for a, b in both]
                    made = o.multiply(dtype, factors, [*block[at], *block[at + 1]])
                    block[at : at + 2] = made[:2], made[2:]


def _operands[Kind: SmemOperand](o: Lanes, ref: Any, kind: Callable[[SmemTile, Any], Kind]) -> list[Kind]:
    """Return the pieces of an operand in shared memory, of which `kind` makes the first from its tile and address."""
    base = o.shared_address(ref)
    *pieces, rows, columns = o.shape(ref)
    return kind(SmemTile(rows, columns), base).pieces(math.prod(pieces))
