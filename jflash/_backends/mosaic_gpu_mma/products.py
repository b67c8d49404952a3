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

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.byte_operand import ByteOperand, rows_beside_bytes
from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.smem_tile import (
    CHUNK,
    LeftOperand,
    PairedColumns,
    SmemOperand,
    SmemTile,
    TransposedOperand,
)
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.threads.builder import WARPS, array_type, tile

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
    by_warp: bool = False
    """Whether each warp takes a quarter of the rows of B's tile, a multiple of 16, as if these were all."""


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
      b: in shared memory, `[K, columns]`, or `[columns, K]` if transposed; or with an axis of pieces before. Of 8-bit
        numbers it is as for `byte_operand`.
      chosen: what is multiplied of both.
      first_row: a multiple of 16, from which on the rows of b count; `None` if it is 0.
      paired: whether the blocks are a pair, each of half of the columns.
    """
    kind = TransposedOperand if isinstance(a, Transposed) else LeftOperand
    dtypes = b.dtype.name, (a[0][0] if isinstance(a, tuple) else b).dtype.name

    def make(o: Lanes, acc: Any, a: Any, b: Any, first_row: Any) -> Any:
        left: Sequence[Left]
        if isinstance(a, tuple):
            left = [RegisterOperand(list(map(o.words_of, tiles))) for tiles in a]
        else:
            left = _operands(o, a, lambda *place: kind(o, *place, paired=paired))
        sums = [list(map(o.numbers, block.registers.flat)) for block in acc]

        def right_operand(tile: SmemTile, base: Any) -> SmemOperand:
            base = base if first_row is None else o.add(base, o.times(first_row, tile.pitch))
            if chosen.by_warp:
                base = o.add(base, o.times(o.warp, tile.rows // WARPS * tile.pitch))
            if dtypes[0] != dtypes[1]:
                return ByteOperand(o, tile, base, dtypes)
            return (PairedColumns if paired else SmemOperand)(o, tile, base)

        multiply(o, _utils.dtype_to_ir_type(dtypes[1]), sums, left, _operands(o, b, right_operand), chosen)
        return tuple(tile(block.shape, map(o.vector_of, pairs)) for block, pairs in zip(acc, sums, strict=True))

    returns = tuple(array_type(one.shape, jnp.float32) for one in acc)
    return Lanes.emit(make, acc, a.ref if isinstance(a, Transposed) else a, b, first_row, returns=returns)


def load_rows(
    ref: Ref, *, columns: int | None = None, transposed: bool = False, paired: bool = False, beside_bytes: bool = False
) -> tuple[Tiles, ...]:
    """Return rows of A from shared memory, or the first `columns` of them: of each piece its blocks of 64, or a pair.

    With `transposed` it is ref's transpose whose rows they are. If there are 16 rows, each warp has them. With
    `beside_bytes` they are A for a transposed B of 8-bit numbers.
    """
    *pieces, rows, depth = ref.shape
    if transposed:
        rows, depth = depth, rows
    shape = WARPGROUP_ROWS, depth if columns is None else columns
    blocks = 2 if paired else pl.cdiv(rows, WARPGROUP_ROWS)
    kind = TransposedOperand if transposed else LeftOperand

    def make(o: Lanes, ref: Any) -> Any:
        pair = _utils.ir.VectorType.get((2,), o.dtype(ref))

        def as_tile(words: Sequence[Any]) -> Any:
            return tile(shape, (_utils.bitcast(word, pair) for word in words))

        def block(operand: LeftOperand | TransposedOperand, number: int) -> Any:
            return as_tile([word for index in range(shape[1] // STEP) for word in operand.fragment(number, index)])

        if beside_bytes:
            return as_tile(rows_beside_bytes(o, SmemTile(rows, depth), o.shared_address(ref)))
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
    order, transposed, steps, first_column, _ = chosen
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
    words = columns * _utils.bitwidth(o.dtype(ref)) // 16
    return kind(SmemTile(rows, words), base).pieces(math.prod(pieces))
