"""A wide call's forward before any array: parts of tiles, shared memory, registers and launch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jflash import _tuning
from jflash._backends.mosaic_gpu import smem, timing_model
from jflash._backends.mosaic_gpu.array_shapes import whole_dims
from jflash._backends.mosaic_gpu.column_chunks import TileParts
from jflash._backends.mosaic_gpu.dealt_items import DealtItems
from jflash._backends.mosaic_gpu.forward_plan import ForwardPlan, visited_tiles
from jflash._backends.mosaic_gpu.forward_schedule import ForwardSchedule
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import WideTiles
from jflash._backends.nvidia import bias_and_mask
from jflash._backends.nvidia.launch import Launch
from jflash._backends.nvidia.packing import may_pack
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import base2, logits, operand_pieces
from jflash._backends.nvidia.tile.logits import LogitsForm
from jflash._backends.nvidia.walk import tile_range
from jflash._semantics.spec import Spec
from jflash._tuning import TuningKey

HALVES = 2
"""Of the columns of values: each has a warpgroup."""

PAIR = "pair"
"""The axis of the two CTAs that share what they copy."""

_MOST_SUMMED = 192
"""Columns of values that one product weighs. Its sums are half as many registers of the 128 that ptxas counts on where
a CTA has 512 threads."""

_KEYS_OF_A_SPLIT = 256
"""At least."""

_FEW_ROWS = 1024
"""A head's blocks run together if it has no more. With 512 causal rows that takes 0.90 of the time, with 1,024 0.98,
with 4,096 1.01 (one H100, 512 columns)."""

_MOST_DEALT = 2**15
"""The most work items that are dealt out: they are a constant of the program."""


class Registers(NamedTuple):
    """Of each thread of a warpgroup; of all four 512 together."""

    weights: int
    weigh: int
    copy: int


@dataclasses.dataclass(frozen=True)
class WideForwardPlan(ForwardPlan):
    """A wide call's forward, known before any array; the output leaves from registers."""

    tile: WideTiles
    in_pairs: bool = False
    """Whether CTAs of neighbouring blocks share the tiles that they copy."""
    dealt: DealtItems | None = None
    """The work items of each CTA; `None`: each has one."""

    @property
    def form(self) -> LogitsForm:
        return logits.form(self.spec, sums_in_parts=True)

    @property
    def consumers(self) -> int:
        return 1 + HALVES

    @property
    def registers(self) -> Registers:
        """What each kind of warpgroup has: half of O takes up to 144, and P 16 for each piece."""
        most = 512 if operand_pieces.number(self.spec) == 1 else 384
        return Registers(136, 176, 24) if whole_dims(self.spec)[1] <= most else Registers(104, 192, 24)

    @property
    def lists_run_together(self) -> bool:
        return super().lists_run_together or (self.is_plain and self.rows <= _FEW_ROWS)

    @property
    def key_parts(self) -> TileParts:
        """Those of a tile of keys."""
        return _key_parts(self.spec, self.tile.keys)

    @property
    def value_parts(self) -> int:
        return _value_parts(self.spec)

    @property
    def columns(self) -> int:
        return _value_columns(self.spec)

    @property
    def stored(self) -> tuple[int, int]:
        return self.schedule.blocks * self.rows_of_a_range, self.value_parts * self.columns

    @property
    def rows_of_a_range(self) -> int:
        return self.tile.rows * (2 if self.in_pairs else 1)

    @property
    def cluster(self) -> str | None:
        """The axis of the CTAs that share copies, if some do."""
        return PAIR if self.in_pairs else None

    @property
    def smem(self) -> Buffers:
        return shared_memory(self.spec, self.tile, self.cluster)

    @property
    def launch(self) -> Launch:
        launch = super().launch
        grid = launch.grid
        if self.dealt is not None:
            grid = {**dict.fromkeys(grid, 1), "block": len(self.dealt.lists)}
        return dataclasses.replace(launch, grid=grid, cluster={PAIR: 2} if self.in_pairs else {})


def _key_parts(spec: Spec, keys: int) -> TileParts:
    """Parts of 128 keys have few columns: a part is 16 to 24 KiB."""
    columns = round_up(whole_dims(spec)[0], 32)
    return TileParts.of(spec, columns, 64) if keys > 64 else TileParts.of(spec, columns)


def _value_parts(spec: Spec) -> int:
    return HALVES * pl.cdiv(whole_dims(spec)[1], HALVES * _MOST_SUMMED)


def _value_columns(spec: Spec) -> int:
    """The columns of a part."""
    parts = _value_parts(spec)
    return round_up(whole_dims(spec)[1], 16 * parts) // parts


def shared_memory(spec: Spec, tile: WideTiles, cluster: str | None = None) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived or something was stored, `empty` when all
    readers are done."""
    (head_dim, value_dim), tiles, parts = whole_dims(spec), CallTiles.of(spec), _key_parts(spec, tile.keys)
    q = tiles.operand((1, WARPGROUP_ROWS, parts.columns), head_dim, chunk=parts.width)
    values = tile.stages, tile.value_keys, _value_columns(spec)
    bias = 1, tile.rows, tile.keys
    return Buffers(
        q_o=(q,),
        q_full=smem.barriers(1, arrivals=smem.copies(q)),
        keys=parts.ring(spec, tile.parts, tile.keys, head_dim, cluster),
        values=[tiles.ring(values, value_dim, readers=1, cluster=cluster) for _ in range(_value_parts(spec))],
        biases=[smem.ring(bias, spec.bias_dtype, readers=1)] if bias_and_mask.has_bias_tiles(spec) else [],
        p=tiles.operand((WARPGROUP_ROWS, tile.keys)),
        rescale=smem.vectors(WARPGROUP_ROWS),
        statistics=smem.vectors(2, WARPGROUP_ROWS),
        p_full=smem.barriers(1),
        p_empty=smem.barriers(1, arrivals=HALVES),
    )


def plan_forward(spec: Spec, processors: int | None) -> WideForwardPlan:
    """The plan of a wide call's forward on a device with `processors` multiprocessors; `None` where that is unknown."""
    packed_heads = _packed_heads(spec) if may_pack(spec) else 1
    blocks, splits = pl.cdiv(spec.query_length * packed_heads, WARPGROUP_ROWS), 1
    if packed_heads > 1 or blocks == 1:
        share = (processors or 0) // (spec.batch * (spec.heads // packed_heads) * blocks)
        splits = max(1, min(share, spec.key_length // _KEYS_OF_A_SPLIT))
    # Where all see the same, CTAs read the same at the same time anyway, and the cache answers them together.
    in_pairs = splits == packed_heads == 1 < blocks and tile_range.blocks_grow(spec)
    schedule = ForwardSchedule(pl.cdiv(blocks, 2) if in_pairs else blocks, spec.batch)
    tile = _choose_tiles(spec, few_rows=blocks == 1)
    plan = WideForwardPlan(spec, tile, schedule, packed_heads, splits, in_pairs=in_pairs)
    return dataclasses.replace(plan, dealt=_deal(plan, processors))


def _deal(plan: WideForwardPlan, processors: int | None) -> DealtItems | None:
    """The work items of each pair of CTAs, if one has several and it is known what they visit.

    Not where all blocks see the same: CTAs with lists come to read at different times. 512 columns take 0.94 to 0.99 of
    the time, but 320 1.04, and keys of 576 1.01. Nor with three pieces of float32, which take 1.06 to 1.13 (one H100).
    """
    spec, pairs = plan.spec, None if processors is None else max(1, processors // 2)
    heads, entries, turns = map(range, (plan.heads, spec.batch, plan.schedule.blocks))
    items = len(heads) * len(entries) * len(turns)
    suits = plan.in_pairs and _limits_are_known(spec) and operand_pieces.number(spec) < 3
    if pairs is None or not suits or not pairs < items <= _MOST_DEALT:
        return None
    # In the order of a grid's CTAs.
    if plan.lists_run_together:
        places = itertools.product(heads, entries, turns)
    else:
        places = ((head, entry, turn) for head, turn, entry in itertools.product(heads, turns, entries))
    visits = visited_tiles(spec, plan.packed_heads, plan.rows_of_a_range, plan.tile.keys)
    return DealtItems.of(tuple(places), tuple(timing_model.ITEM + count for count in reversed(visits)), pairs)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of a forward."""
    return bool(_fitting(spec, few_rows=True))


def _limits_are_known(spec: Spec) -> bool:
    """Whether what is seen is known before the call, but for a dense mask."""
    return spec.operands.isdisjoint({"query_offset", *tile_range.LIMITS})


def _packed_heads(spec: Spec) -> int:
    """How many heads that share keys go into the rows of one tile: as many as end where a block does."""
    one_block = spec.query_length * spec.group <= WARPGROUP_ROWS
    return spec.group if one_block else math.gcd(spec.group, WARPGROUP_ROWS)


def _sizes(spec: Spec, *, few_rows: bool) -> Iterator[tuple[int, int]]:
    """Keys of a tile, and tiles of values in shared memory together; the best first.

    With 128 keys a product of S reads less of Q, where registers hold as many logits.
    """
    is_plain = base2.is_plain(spec) and spec.dropout_rate == 0 and _limits_are_known(spec)
    few_columns = whole_dims(spec)[1] <= 512 and spec.dtype != jnp.float32
    # A block's rows see parts of two tiles, at both ends of a window.
    if spec.bounds[0] is None and is_plain and few_columns and not few_rows:
        yield from ((128, 2), (128, 1))
    yield from ((64, 2), (64, 1))


def _fitting(spec: Spec, *, few_rows: bool) -> Sequence[WideTiles]:
    """Tiles for which shared memory has room, each with as many parts as fit, of up to two whole tiles."""
    found = list[WideTiles]()
    for keys, stages in _sizes(spec, few_rows=few_rows):
        parts = _key_parts(spec, keys)
        # One more tile of values is not worth a part of keys.
        least = parts.number if stages > 1 else parts.least
        tiles = (WideTiles(1, keys, stages, count) for count in range(2 * parts.number, least - 1, -1))
        found += [tile for tile in tiles if smem.fits(shared_memory(spec, tile))][:1]
    return found


def _choose_tiles(spec: Spec, *, few_rows: bool) -> WideTiles:
    rows_kind = "short" if few_rows else "long"
    facts = *whole_dims(spec), bias_and_mask.bias_tile_bytes(spec), rows_kind, *operand_pieces.facts(spec)
    return _tuning.choose(TuningKey("mosaic_gpu wide forward", facts), _fitting(spec, few_rows=few_rows))
