"""Products by `mma.sync.m16n8k16`: a warpgroup's accumulators in registers, B and sometimes A in shared memory.

Each warp makes 16 rows of every 64. What a lane holds of an accumulator, of 16 rows and 8 columns, are two neighbours
of row lane / 4 and of the row 8 below: for a warpgroup that is the layout of wgmma's accumulators,
`plgpu.Layout.WGMMA`. Two of them side by side, rounded to 16 bits, are a fragment of A: so P is an operand as it is.

B's fragments come from `ldmatrix`, two of 8 columns at once, and serve all 64-row blocks. What a multiprocessor reads
from shared memory for them takes longer than the products of one block, and less than those of two; so does what it
reads for A, unless A is held in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Ref
from jflash._backends.mosaic_gpu_mma.hardware.lanes import Lanes
from jflash._backends.mosaic_gpu_mma.hardware.smem_tile import CHUNK, SmemTile

Tiles = tuple[Float[Array, "64 columns"], ...]

_LAYOUT = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())
_utils: Any = mgpu.utils


def add_product(
    acc: Tiles, a: Tiles | Ref, b: Ref, *, transposed: bool, first_row: Any = None, a_transposed: bool = False
) -> Tiles:
    """acc + a @ b, or with `transposed` acc + a @ b.T.

    Args:
      acc: blocks of 64 rows, in float32.
      a: the same rows, in registers, or `[rows, K]` in shared memory.
      b: in shared memory, `[K, columns]`, or `[columns, K]` if transposed.
      transposed: whether it is b's transpose that `a` is multiplied with.
      first_row: a multiple of 16, from which on the rows of a transposed b count; `None` if it is 0.
      a_transposed: whether `a` is `[K, rows]`, in shared memory.
    """
    in_registers = isinstance(a, tuple)
    layouts = (_LAYOUT,) * len(acc)
    given = [] if first_row is None else [jnp.int32(first_row)]

    @plgpu.inline_mgpu(
        arg_types=(layouts, layouts if in_registers else plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * len(given)),
        return_type=_results([one.shape for one in acc], jnp.float32),
    )
    def made(_: Any, acc: Any, a: Any, b: Any, *first: Any) -> Any:
        o = Lanes()
        if in_registers:
            left = RegisterOperand(list(map(words, a)))
        else:
            left = TransposedOperand(o, *_place(o, a)) if a_transposed else _smem_operand(o, a, by_warps=True)
        sums = [[o.numbers(pair) for pair in block.registers.flat] for block in acc]
        dtype = _utils.ir.MemRefType(b.type).element_type
        right = _smem_operand(o, b, by_warps=False, first_row=first[0].registers.item() if first else None)
        multiply(o, dtype, sums, left, right, transposed=transposed)
        return tuple(_array(o, block.shape, o.number_type, of_block) for block, of_block in zip(acc, sums, strict=True))

    call: Any = made
    return call(acc, a, b, *given)


def load_rows(ref: Ref) -> Tiles:
    """Rows of A from shared memory, in blocks of 64."""
    rows, columns = ref.shape
    blocks = rows // WARPGROUP_ROWS

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=_results([(WARPGROUP_ROWS, columns)] * blocks, ref.dtype)
    )
    def loaded(_: Any, ref: Any) -> Any:
        o = Lanes()
        operand, dtype = _smem_operand(o, ref, by_warps=True), _utils.ir.MemRefType(ref.type).element_type
        pair = _utils.ir.VectorType.get((2,), dtype)

        def block(number: int) -> Any:
            words = [word for index in range(columns // 16) for word in operand.fragment(number, index)]
            return _array(
                o, (WARPGROUP_ROWS, columns), dtype, [o.numbers(_utils.bitcast(word, pair)) for word in words]
            )

        return tuple(map(block, range(blocks)))

    call: Any = loaded
    return call(ref)


class RegisterOperand:
    """Rows of A that a warpgroup holds in the layout of accumulators: words of two numbers."""

    def __init__(self, blocks: Sequence[Sequence[Any]]) -> None:
        self.blocks = blocks

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """The four words of 16 columns of a block of 64 rows."""
        return self.blocks[block][4 * index : 4 * index + 4]


class SmemOperand:
    """A tile in shared memory."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any, *, by_warps: bool) -> None:
        """Of A each warp reads its own rows, `by_warps`; of B all read the same."""
        self.o, self.tile = o, tile
        self.base = o.add(base, o.times(o.warp, 16 * tile.pitch)) if by_warps else base
        self.first_chunk = None
        """That of the lane's warp, if it has chunks of its own."""
        self.addresses: dict[tuple[int, bool], Any] = {}

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Of A: the four words of 16 columns of a block of 64 rows."""
        return self.matrices(block * WARPGROUP_ROWS, 2 * index, rows_first=True, transpose=False)

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        """Four 8 x 8 matrices, which make 16 rows, from `row` on, of two chunks; in the order of rows, both chunks of
        each eight, or with `rows_first` in that of chunks."""
        address, offset = self._address(chunk, rows_first), self.tile.place(row, chunk)
        return self.o.load_matrices(address, offset, transpose=transpose)

    def _address(self, chunk: int, rows_first: bool) -> Any:
        """Where a lane's row of the matrices begins, but for what is the same for all lanes."""
        key = chunk % self.tile.chunks, rows_first
        if key not in self.addresses:
            o = self.o
            row, matrix = o.arith.andi(o.lane, o(7)), o.right(o.lane, 3)
            low, high = o.arith.andi(matrix, o(1)), o.right(matrix, 1)
            below, beside = (low, high) if rows_first else (high, low)
            own_row, own_chunk = o.add(row, o.left(below, 3)), o.arith.ori(beside, o(key[0]))
            if self.first_chunk is not None:
                own_chunk = o.arith.ori(own_chunk, self.first_chunk)
            places = o.times(own_row, self.tile.pitch), self.tile.permuted(o, row, own_chunk)
            self.addresses[key] = o.add(self.base, *places)
        return self.addresses[key]


class TransposedOperand(SmemOperand):
    """A tile `[K, rows]` in shared memory as A, of which each warp reads its own columns, 16 of every 64."""

    def __init__(self, o: Lanes, tile: SmemTile, base: Any) -> None:
        super().__init__(o, tile, base, by_warps=False)
        self.first_chunk = o.times(o.warp, 2)

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        return self.matrices(16 * index, block * WARPGROUP_ROWS // CHUNK, rows_first=False, transpose=True)


def multiply(
    o: Lanes,
    dtype: Any,
    sums: Sequence[list[Any]],
    left: RegisterOperand | SmemOperand,
    right: SmemOperand,
    *,
    transposed: bool,
) -> None:
    """Add a product to each block's sums, a list of pairs of neighbours in the order of an accumulator's registers."""
    depth, columns = right.tile.columns if transposed else right.tile.rows, 4 * len(sums[0])
    for k in range(depth // 16):
        fragments = [left.fragment(block, k) for block in range(len(sums))]
        for n in range(columns // 16):
            row, chunk = (16 * n, 2 * k) if transposed else (16 * k, 2 * n)
            words = right.matrices(row, chunk, rows_first=not transposed, transpose=not transposed)
            for eight in range(2):
                at = 4 * n + 2 * eight
                for block, a in zip(sums, fragments, strict=True):
                    made = o.multiply(dtype, a, words[2 * eight : 2 * eight + 2], [*block[at], *block[at + 1]])
                    block[at : at + 2] = made[:2], made[2:]


def _smem_operand(o: Lanes, ref: Any, *, by_warps: bool, first_row: Any = None) -> SmemOperand:
    tile, base = _place(o, ref)
    base = base if first_row is None else o.add(base, o.times(first_row, tile.pitch))
    return SmemOperand(o, tile, base, by_warps=by_warps)


def _place(o: Lanes, ref: Any) -> tuple[SmemTile, Any]:
    """A tile in shared memory, and where it begins."""
    base = _utils.llvm.ptrtoint(o.type, _utils.memref_ptr(ref))
    return SmemTile(*_utils.ir.MemRefType(ref.type).shape), base


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
