"""Products by `mma.sync.m16n8k16`: a warpgroup's accumulators in registers, B and sometimes A in shared memory.

Each warp makes 16 rows of every 64. What a lane holds of an accumulator, of 16 rows and 8 columns, are two neighbours
of row lane / 4 and of the row 8 below: for a warpgroup that is the layout of wgmma's accumulators,
`plgpu.Layout.WGMMA`. Two of them side by side, rounded to 16 bits, are a fragment of A: so P is an operand as it is.

B's fragments come from `ldmatrix`, two of 8 columns at once, and serve all 64-row blocks: two blocks read shared memory
half as often as one.

Source of the layouts: PTX ISA, mma.m16n8k16 and ldmatrix.
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
from jflash._backends.mosaic_gpu.hardware.lane_words import LaneWords
from jflash._backends.mosaic_gpu_mma.hardware.smem_tile import SmemTile

Tiles = tuple[Float[Array, "64 columns"], ...]

_LAYOUT = plgpu.Layout.WGMMA


def add_product(acc: Tiles, a: Tiles | Ref, b: Ref, *, transposed: bool) -> Tiles:
    """acc + a @ b, or with `transposed` acc + a @ b.T.

    Args:
      acc: blocks of 64 rows, in float32.
      a: the same rows, in registers, or `[rows, K]` in shared memory.
      b: in shared memory, `[K, columns]`, or `[columns, K]` if transposed.
      transposed: whether it is b's transpose that `a` is multiplied with.
    """
    in_registers = isinstance(a, tuple)
    results = tuple(plgpu.ShapeDtypeStruct(one.shape, jnp.dtype(jnp.float32), layout=_LAYOUT) for one in acc)
    layouts = (_LAYOUT,) * len(acc)

    @plgpu.inline_mgpu(
        arg_types=(layouts, layouts if in_registers else plgpu.RefType(), plgpu.RefType()), return_type=results
    )
    def made(_: Any, acc: Any, a: Any, b: Any) -> Any:
        o = LaneWords()
        left = RegisterOperand(a) if in_registers else SmemOperand(o, a, by_warps=True)
        right = SmemOperand(o, b, by_warps=False)
        return _multiply(o, acc, left, right, transposed=transposed)

    call: Any = made
    return call(acc, a, b)


class RegisterOperand:
    """Rows of A that a warpgroup holds in the layout of accumulators."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.registers = [block.registers.flatten() for block in blocks]
        self.dtype = blocks[0].mlir_dtype

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """The four registers of 16 columns of a block of 64 rows."""
        word = mgpu.utils.ir.IntegerType.get_signless(32)
        return [mgpu.utils.bitcast(pair, word) for pair in self.registers[block][4 * index : 4 * index + 4]]


class SmemOperand:
    """A tile in shared memory, `[rows, columns]`."""

    def __init__(self, o: LaneWords, ref: Any, *, by_warps: bool) -> None:
        """Of A each warp reads its own rows, `by_warps`; of B all read the same."""
        utils: Any = mgpu.utils
        kind = utils.ir.MemRefType(ref.type)
        rows, columns = kind.shape
        self.o, self.tile, self.dtype = o, SmemTile(rows, columns), kind.element_type
        self.base = utils.llvm.ptrtoint(o.type, utils.memref_ptr(ref))
        if by_warps:
            self.base = o.add(self.base, o.times(o.warp, 16 * self.tile.pitch))
        self.addresses: dict[tuple[int, bool], Any] = {}

    def fragment(self, block: int, index: int) -> Sequence[Any]:
        """Of A: the four registers of 16 columns of a block of 64 rows."""
        return self.matrices(block * WARPGROUP_ROWS, 2 * index, rows_first=True, transpose=False)

    def matrices(self, row: int, chunk: int, *, rows_first: bool, transpose: bool) -> Sequence[Any]:
        """Four 8 x 8 matrices, which make 16 rows from `row` on and two chunks. Those of the first chunk come first, or
        with `rows_first` both of the first eight rows' after both rows of the first chunk."""
        address, offset = self._address(chunk, rows_first), self.tile.place(row, chunk)
        suffix = ".trans" if transpose else ""
        load = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        words = [self.o.type] * 4
        return mgpu.utils.inline_ptx(load, address, result_types=words, has_side_effects=True, convergent=True)

    def _address(self, chunk: int, rows_first: bool) -> Any:
        """Where a lane's row of the matrices begins, but for what is known before; lanes of eight have one each."""
        key = chunk % self.tile.chunks, rows_first
        if key not in self.addresses:
            o = self.o
            row, eight = o.arith.andi(o.lane, o(7)), o.right(o.lane, 3)
            low, high = o.arith.andi(eight, o(1)), o.right(eight, 1)
            below, beside = (low, high) if rows_first else (high, low)
            chosen = o.arith.ori(beside, o(key[0]))
            own_row = o.add(row, o.left(below, 3))
            places = o.times(own_row, self.tile.pitch), self.tile.permuted(o, row, chosen)
            self.addresses[key] = o.add(self.base, *places)
        return self.addresses[key]


def _multiply(o: LaneWords, acc: Sequence[Any], left: Any, right: SmemOperand, *, transposed: bool) -> tuple[Any, ...]:
    tile = right.tile
    depth, columns = (tile.columns, tile.rows) if transposed else (tile.rows, tile.columns)
    sums = [[o.numbers(pair) for pair in block.registers.flatten()] for block in acc]
    for k in range(depth // 16):
        fragments = [left.fragment(block, k) for block in range(len(acc))]
        for n in range(columns // 16):
            place = dict(row=16 * n, chunk=2 * k) if transposed else dict(row=16 * k, chunk=2 * n)
            words = right.matrices(**place, rows_first=not transposed, transpose=not transposed)
            for pair in range(2):
                at = 4 * n + 2 * pair
                for block, a in zip(sums, fragments, strict=True):
                    made = _mma(right.dtype, a, words[2 * pair : 2 * pair + 2], [*block[at], *block[at + 1]])
                    block[at], block[at + 1] = made[:2], made[2:]
    return tuple(_packed(o, block, of_block) for block, of_block in zip(acc, sums, strict=True))


def _mma(dtype: Any, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    instruction = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    number = mgpu.utils.ir.F32Type.get()
    return list(mgpu.utils.inline_ptx(instruction, *a, *b, *c, result_types=[number] * 4, convergent=True))


def _packed(o: LaneWords, like: Any, pairs: Sequence[Sequence[Any]]) -> Any:
    registers = np.empty(like.registers.size, dtype=object)
    for index, pair in enumerate(pairs):
        registers[index] = o.vector.from_elements(like.registers.flat[index].type, list(pair))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(like.registers.shape), _layout=like.layout, _is_signed=None
    )
