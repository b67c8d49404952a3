"""What the kernels' CTAs have in common: one warpgroup, or two, which copy for themselves and compute."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.copies import ColumnChunk
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.mosaic_gpu_mma.products import STEP, STEPS_OF_PIECES, Operand, Tiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.launch import KernelPlan, Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.prepare import LENGTHS
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a CTA owns and visits at a time."""

    blocks: int
    """Blocks of 64 rows that the CTA owns: of queries, or in the kernel of dK and dV of keys."""
    size: int
    """Keys, or queries, of a tile that it visits."""
    stages: int
    """Visited tiles that are in shared memory together."""
    held: int = 0
    """Operands of its own rows, of those that the kernel names first, that the CTA holds in registers. From shared
    memory they are read again for every tile."""
    warpgroups: int = 1
    """Of the CTA, which share its rows; two in the fused backward and for the bias alone."""
    passes: int = 1
    """Parts of a visited tile whose products with the own rows come one after the other, in the fused backward: fewer
    are in registers at a time."""
    held_columns: int = dataclasses.field(default=0, kw_only=True)
    """Columns that the CTA holds of the first operand which it does not hold whole, a multiple of 16."""
    paired: bool = dataclasses.field(default=False, kw_only=True)
    """Whether in the forward O is a pair of blocks (`products`), for which P goes through shared memory; of
    64 rows, and with one stage."""
    sums_in_parts: bool = dataclasses.field(default=False, kw_only=True)
    """Whether in the forward registers are left for the parts of a row's sum."""
    streams: bool = dataclasses.field(default=False, kw_only=True)
    """Whether the CTA's own 64 rows stay in device memory, and are loaded for every product: shared memory has room for
    what is visited alone."""
    lends: bool = dataclasses.field(default=False, kw_only=True)
    """Whether the operands of the first product leave their shared memory to those of the second, where all are read
    once."""

    @property
    def rows(self) -> int:
        """Rows that a CTA owns."""
        return self.blocks * WARPGROUP_ROWS


class PartlyHeld(NamedTuple):
    """Rows in shared memory, whose first columns are in registers too."""

    held: tuple[Tiles, ...]
    rows: Ref


class Streamed(NamedTuple):
    """64 rows in device memory."""

    source: Ref
    """`[L, H]`, in pieces side by side."""
    first: Any
    limit: Any
    """Rows from here on are zeros: 0 * NaN is NaN."""


def columns(dim: int) -> int:
    """Columns of a tile of rows of H or D numbers."""
    return round_up(dim, 16)


def buffer(spec: Spec, *shape: int) -> Any:
    """Shared memory for tiles `[..., rows, columns]` of an operand; of more than one piece, `[..., pieces, rows,
    columns]`."""
    pieces = operand_pieces.number(spec)
    return plgpu.SMEM((*shape[:-2], *[pieces] * (pieces > 1), *shape[-2:]), operand_pieces.dtype(spec))


def copies_bias(spec: Spec) -> bool:
    """Whether tiles of the bias come through shared memory, as those of operands do: numbers of 16 bits."""
    return bias_and_mask.bias_tile_bytes(spec) == 2


def bias_buffer(spec: Spec, *shape: int) -> Any:
    """Shared memory for tiles `[..., rows, columns]` of the bias, if they come through it."""
    if spec.bias_dtype is None or not copies_bias(spec):
        return None
    return plgpu.SMEM(shape, spec.bias_dtype)


def lending(buffers: Buffers, first: Sequence[str], then: Sequence[str]) -> Buffers:
    """Shared memory in which some buffers take the place of others that were used first."""
    some = lambda names: Buffers(**{name: buffer for name, buffer in vars(buffers).items() if name in names})
    others = vars(buffers).keys() - {*first, *then}
    return Buffers(lent=plgpu.RefUnion(some(first), some(then)), **vars(some(others)))


@dataclasses.dataclass(frozen=True)
class TiledPlan(KernelPlan):
    """A kernel with a tile, before any array."""

    tile: Tile


class Cta[Plan: TiledPlan]:
    """A CTA's view of its call."""

    def __init__(self, plan: Plan, refs: Refs, ops: MmaOps, **options: Any) -> None:
        """`options` are those of `KernelInputs`."""
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        if plan.tile.lends:
            first, then = refs.smem.lent
            self.smem = Buffers(**vars(refs.smem), **vars(first), **vars(then))
        self.inputs = KernelInputs(plan.spec, ops, refs.arrays, **options)

    @classmethod
    def launch(cls, plan: Plan, arrays: Mapping[str, Any], ops: MmaOps) -> dict[str, Array]:
        """Launch the plan's kernel; its results by name."""
        return plan.launch.run(lambda refs: cls(plan, refs, ops).run(), arrays, ops)

    def run(self) -> None:
        """What the CTA does."""
        raise NotImplementedError

    def copy(self, name: str, batch: Any, head: Any, first: Any, target: Ref, part: ColumnChunk | None = None) -> None:
        """Begin to copy rows of queries, keys, values or d_out, or a part of their columns, with zeros for padding:
        0 * NaN is NaN."""
        source, limit = self._rows(name, batch, head)
        self.ops.copy_rows(source, target, first, limit, part)

    def own_rows(self, name: str, batch: Any, head: Any, first: Any, target: Ref | None) -> Ref | Streamed:
        """The CTA's own rows, where products find them: begin to copy them to shared memory, if they have room."""
        if target is None:
            return self.streamed(name, batch, head, first)
        self.copy(name, batch, head, first, target)
        return target

    def streamed(self, name: str, batch: Any, head: Any, first: Any) -> Streamed:
        """Rows that products load from device memory."""
        source, limit = self._rows(name, batch, head)
        return Streamed(source, first, limit)

    def _rows(self, name: str, batch: Any, head: Any) -> tuple[Ref, Any]:
        """A head's rows, and where padding begins."""
        array, packed = self.refs.arrays[name], self.inputs.packed_heads if name == "query" else 1
        source = rows_of_head(array, batch, head, heads_first=packed > 1)
        length: Any = self.inputs.value(LENGTHS[name], batch)
        return source, source.shape[0] if length is None else jnp.minimum(length * packed, source.shape[0])

    def copy_bias(self, at: TileCoord, target: Ref) -> None:
        """Begin to copy a tile of the bias, `[queries, keys]`, with zeros past the array's ends."""
        source = self.inputs.part("bias", at.batch, at.head)
        # Tiles begin at multiples of 64.
        whole = round_up(source.shape[1], 64) + max(target.shape[1] - 64, 0)
        self.ops.copy_rows(source, target, at.query, source.shape[0], ColumnChunk(at.key, whole))

    def add_product(
        self, acc: Tiles, a: Operand | PartlyHeld | Streamed, b: Ref, *, transposed: bool, **options: Any
    ) -> Tiles:
        """acc + a @ b, or with `transposed` acc + a @ b.T, of a tile in shared memory; `options` are those of the
        operation."""
        pieces = operand_pieces.number(self.plan.spec)
        order = operand_pieces.order(pieces)
        if isinstance(a, Streamed):
            # As few columns at a time as are one sum.
            for steps in itertools.batched(range(b.shape[-1] // STEP), STEPS_OF_PIECES):
                rows = self.ops.load_device_rows(*a, pieces, STEP * steps[0], STEP * len(steps))
                acc = self.ops.add_product(acc, rows, b, order, transposed=transposed, steps=steps, **options)
            return acc
        if isinstance(a, PartlyHeld):
            every, held = a.rows.shape[-1] // STEP, a.held[0][0].shape[1] // STEP
            acc = self.ops.add_product(acc, a.held, b, order, transposed=transposed, steps=range(held), **options)
            a, options = a.rows, dict(steps=range(held, every), **options)
        return self.ops.add_product(acc, a, b, order, transposed=transposed, **options)

    def slot(self, index: Any) -> Any:
        """Where in shared memory the tile is that is visited after `index` others."""
        stages = self.plan.tile.stages
        return lax.rem(index, stages) if stages > 1 else 0

    def own_operands(self, *rows: Ref | Streamed) -> list[Operand | PartlyHeld | Streamed]:
        """Those of the CTA's own rows, of which the first may be held in registers; when they have arrived."""
        held, columns, load = self.plan.tile.held, self.plan.tile.held_columns, self.ops.load_rows
        if held or columns:
            self.ops.wait(warpgroups=self.plan.tile.warpgroups)
        partly = [PartlyHeld(load(one, columns=columns), one) for one in rows[held:][: columns > 0]]
        return [*map(load, rows[:held]), *partly, *rows[held + len(partly) :]]

    def zeros(self, blocks: int, width: int) -> Tiles:
        """Accumulators."""
        return tuple(self.ops.full((WARPGROUP_ROWS, width), 0) for _ in range(blocks))

    def load(self, at: TileCoord, shape: tuple[int, int]) -> dict[str, Array]:
        """The packed mask and the bias of a tile, by name, if they have both axes, or the bias has that of keys; but no
        bias that comes through shared memory."""
        inputs = self.inputs
        loaded = inputs.load_packed_mask(at, shape) | ({} if inputs.keys_first else inputs.load_key_bias(at, shape))
        if bias_and_mask.has_bias_tiles(inputs.spec) and getattr(self.smem, "bias", None) is None:
            loaded["bias"] = self.load_bias(at, shape)
        return loaded

    def load_bias(self, at: TileCoord, shape: tuple[int, int]) -> Array:
        """A tile of a bias of both axes, from device memory."""
        part = self.inputs.part("bias", at.batch, at.head)
        return self.ops.load_tile(part, at.query, at.key, shape, transposed=self.inputs.keys_first)


def by_piece(blocks: Iterable[Pieces]) -> Operand:
    """An operand in registers, of blocks of 64 rows in pieces: each of its pieces is of all blocks."""
    return tuple(zip(*blocks, strict=True))


def rows_of_head(array: Ref, batch: Any, head: Any, *, heads_first: bool = False) -> Ref:
    """`[L, H]` of one head of an array `[B, L, N, H]`, or with `heads_first` `[B, N, L, H]`."""
    return array.at[batch, head] if heads_first else array.at[batch, :, head]
