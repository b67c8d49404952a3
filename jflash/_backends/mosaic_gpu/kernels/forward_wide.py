"""Forward of wide heads (`widths`): two warpgroups share the columns of a CTA's 64 rows of the output.

    the first, with half of V's columns, as in `forward`       the second, with the other half
      S = Q K_j^T
      O = O + P V_(j-1)
      P, m, l = online softmax of S              --- P, rescale, m, l --->
      O = O * rescale                                            O = O * rescale
                                                                 O = O + P V_j
      out = O / l;  lse = log l + m                              out = O / l
    the producer warpgroup copies tiles of keys, and of each half of the values, ahead of them into shared memory

O of 64 rows and 512 columns takes 256 registers of each thread of one warpgroup, or 128 of two. S is made once: with a
CTA for each half of the columns it would be made twice. The second warpgroup's products run beside the first one's
exponentials.

Counted, with H = D = 512: for 64 keys a CTA copies 128 KiB and makes 4.2 million multiply-adds, 32 for each byte. With
256, where a CTA has 128 rows, it makes 64. float32 in two pieces has as many bytes with H = D = 256, and 48 for each.

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), "A Deep Dive Into The New Flash MLA Kernel", whose first kernel has
this division; its later one lets both warpgroups make every other S.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash import _tuning
from jflash._backends.mosaic_gpu import logits, online_softmax
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS, Buffers, WarpgroupOps, pipeline, round_up, smem
from jflash._backends.mosaic_gpu.inputs import CallTiles, TileCoord, bias_and_mask, operand_pieces, whole_dims
from jflash._backends.mosaic_gpu.inputs.operand_pieces import Pieces
from jflash._backends.mosaic_gpu.kernels.forward import ForwardCta, MainLoop
from jflash._backends.mosaic_gpu.kernels.forward_plan import ForwardPlan, may_pack
from jflash._backends.mosaic_gpu.logits import LogitsForm
from jflash._backends.mosaic_gpu.online_softmax import Softmax
from jflash._backends.mosaic_gpu.schedule import ForwardSchedule, RowTiles, TileRange
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

_KEY_COLUMNS = 128
"""Of a part of a tile of keys."""

_TILES = (RowTiles(1, 64, 2), RowTiles(1, 64, 1), RowTiles(1, 32, 1))


def shared_memory(spec: Spec, tile: RowTiles) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived or P was stored, `empty` when all readers are
    done."""
    (head_dim, value_dim), has_bias_tiles = whole_dims(spec), bias_and_mask.has_bias_tiles(spec)
    columns, half = round_up(head_dim, 16), round_up(value_dim, 32) // 2
    # A product's operands have one swizzle, which divides the columns of both: P's are keys.
    part = math.gcd(half, tile.keys)
    tiles = CallTiles.of(spec)
    ring = functools.partial(tiles.ring, readers=1)
    return Buffers(
        q_o=(tiles.operand((1, WARPGROUP_ROWS, columns), head_dim),),
        q_full=smem.barriers(1),
        k=[
            ring((tile.stages, tile.keys, width), head_dim, others=int(has_bias_tiles and number == 0), part=columns)
            for number, width in enumerate(_key_parts(spec, columns))
        ],
        v=[ring((tile.stages, tile.keys, half), value_dim, part=part) for _ in range(2)],
        # Tiles of the bias come and go with the keys.
        bias=smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        bias_columns=None,
        p=tiles.operand((WARPGROUP_ROWS, tile.keys), value_dim, part=part),
        statistics=smem.vectors(3, WARPGROUP_ROWS),
        p_full=smem.barriers(1),
        p_empty=smem.barriers(1),
        # As in `forward`.
        fence=smem.vectors(1, WARPGROUP_ROWS),
    )


def _key_parts(spec: Spec, columns: int) -> Sequence[int]:
    """The columns of each part of a tile of keys. Where there is room for one tile, a part of the next is copied while
    others are still read. The pieces of float32 lie side by side, and come together."""
    whole = 1 if operand_pieces.number(spec) > 1 else columns // _KEY_COLUMNS
    return (*[_KEY_COLUMNS] * (whole - 1), columns - _KEY_COLUMNS * (whole - 1)) if whole > 1 else (columns,)


@dataclasses.dataclass(frozen=True)
class WideForwardPlan(ForwardPlan):
    """A wide call's forward, known before any array; the output leaves from registers."""

    @property
    def form(self) -> LogitsForm:
        return logits.form(self.spec, bias_by_mma=False)

    @property
    def value_parts(self) -> int:
        return 2

    @property
    def columns(self) -> int:
        return round_up(whole_dims(self.spec)[1], 32) // 2

    @property
    def consumers(self) -> int:
        return 2

    @property
    def overlaps(self) -> bool:
        # No other warpgroup's products run beside the softmax.
        return True

    @property
    def skips_tiles(self) -> bool:
        return False

    @property
    def stored(self) -> tuple[int, int]:
        return self.schedule.blocks * self.tile.rows, 2 * self.columns

    @property
    def smem(self) -> Buffers:
        return shared_memory(self.spec, self.tile)


def plan_forward(spec: Spec, processors: int | None) -> WideForwardPlan:
    """The plan of a wide call's forward on a device with `processors` multiprocessors; `None` where that is unknown."""
    packed_heads = _packed_heads(spec) if may_pack(spec) else 1
    rows = spec.query_length * packed_heads
    blocks = pl.cdiv(rows, WARPGROUP_ROWS)
    tile = _choose_tiles(spec)
    splits = 1
    if packed_heads > 1 or blocks == 1:
        share = (processors or 0) // (spec.batch * (spec.heads // packed_heads) * blocks)
        splits = max(1, min(share, spec.key_length // (4 * tile.keys)))
    return WideForwardPlan(spec, tile, ForwardSchedule(blocks, spec.batch), packed_heads, splits)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of a forward."""
    return smem.fits(shared_memory(spec, _TILES[-1]))


def _packed_heads(spec: Spec) -> int:
    """How many heads that share keys go into the rows of one tile: as many as end where a block does."""
    one_block = spec.query_length * spec.group <= WARPGROUP_ROWS
    return spec.group if one_block else math.gcd(spec.group, WARPGROUP_ROWS)


def _choose_tiles(spec: Spec) -> RowTiles:
    fitting = [tile for tile in _TILES if smem.fits(shared_memory(spec, tile))]
    facts = *whole_dims(spec), bias_and_mask.bias_tile_bytes(spec), *operand_pieces.facts(spec)
    return _tuning.choose(TuningKey("mosaic_gpu wide forward", facts), fitting)


def forward(plan: WideForwardPlan, arrays: Mapping[str, Array], ops: WarpgroupOps) -> dict[str, Array]:
    """Launch the kernel; results as `forward.forward` has them, both in whole blocks of rows."""
    return _Cta.launch(plan, arrays, ops)


class _Cta(ForwardCta):
    def run(self) -> None:
        for index, body in enumerate((self.compute, self.weigh, self.copy)):
            pl.when(self.warpgroup == index)(body)

    def main_loop(self, tiles: TileRange, at: TileCoord, visited: Any) -> MainLoop:
        return _HandingLoop(self, tiles, at, visited)

    def rows(self, block: Any) -> Any:
        return pl.ds(self.block_start(block), WARPGROUP_ROWS)

    def weigh(self) -> None:
        """Weigh the second half of the values, by what the first warpgroup makes."""
        plan, shared, ops = self.plan, self.smem, self.ops
        pipeline.release(shared.v[1].empty)
        plgpu.barrier_arrive(shared.p_empty)
        pipeline.split_registers(plan.consumers, copies=False)
        batch, block, tiles = self.item(0)
        acc_o = lax.fori_loop(0, tiles.count, self._add_tile, ops.full((WARPGROUP_ROWS, plan.columns), 0))
        m, l = (ops.load(shared.statistics.at[number], 0) for number in range(2))
        sink = None if plan.splits > 1 else self.inputs.value("sinks", batch, self.head)
        out, _ = online_softmax.finish(plan.spec, self.form.exponent(plan.spec), m, l, acc_o, sink)
        self._store_half(1, batch, block, out)

    def _add_tile(self, index: Array, acc_o: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
        v, shared, ops = self.smem.v[1], self.smem, self.ops
        slot = lax.rem(index, self.plan.tile.stages)
        plgpu.barrier_wait(shared.p_full)
        pieces = functools.partial(operand_pieces.of_tile, self.plan.spec)
        p, rescale = tuple(map(ops.load, pieces(shared.p))), ops.load(shared.statistics.at[2], 0)
        plgpu.barrier_arrive(shared.p_empty)
        acc_o = self.form.rescaled(self.inputs, rescale, acc_o)
        plgpu.barrier_wait(v.full.at[slot])
        acc_o = operand_pieces.add_matmul(self.plan.spec, acc_o, p, pieces(v.tiles.at[slot]), ops)
        plgpu.barrier_arrive(v.empty.at[slot])
        return acc_o

    def store(self, batch: Array, block: Array, out: Array, lse: Array) -> None:
        self.refs.results["lse"][self.split, batch, self.head, self.rows(block)] = lse
        self._store_half(0, batch, block, out)

    def _store_half(self, half: int, batch: Array, block: Array, out: Array) -> None:
        result, columns = self.refs.results["out"].at[self.split, batch], self.plan.columns
        self.part(result, block, pl.ds(half * columns, columns))[...] = out.astype(result.dtype)


class _HandingLoop(MainLoop):
    """The first warpgroup's."""

    def run(self, q_read: Callable[[], None]) -> tuple[Softmax, Float[Array, "rows D"]]:
        results = super().run(q_read)
        # No barrier may end in the middle of its phase.
        plgpu.barrier_wait(self.cta.smem.p_empty)
        return results

    def hand_over(self, state: Softmax) -> None:
        shared, spec = self.cta.smem, self.cta.plan.spec
        pieces = operand_pieces.split(spec, state.p, self.cta.ops)
        plgpu.barrier_wait(shared.p_empty)
        for target, piece in zip(operand_pieces.of_tile(spec, shared.p), pieces, strict=True):
            target[...] = piece
        for number, statistic in enumerate((state.m, state.l, state.rescale)):
            shared.statistics[number] = statistic
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.p_full)

    def p(self, state: Softmax) -> Pieces:
        # Registers that are stored too would serialise products: ptxas (CUDA 13.5) writes them once more among these.
        return operand_pieces.of_tile(self.cta.plan.spec, self.cta.smem.p)
