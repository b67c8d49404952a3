"""A wide call's forward before any array: chunks of tiles, shared memory, registers, lists of items and launch.

What was measured: examples/benchmarks/experiments/2026-11-27-wide-forward.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from jax.experimental import pallas as pl
from jaxtyping import Array

from jflash._backends.mosaic_gpu import forward_schedule, smem
from jflash._backends.mosaic_gpu.array_shapes import whole_dims
from jflash._backends.mosaic_gpu.column_chunks import ColumnChunks
from jflash._backends.mosaic_gpu.forward_plan import KEYS_OF_A_SPLIT, ForwardPlan, visited_tiles
from jflash._backends.mosaic_gpu.forward_schedule import ForwardSchedule, Lists
from jflash._backends.mosaic_gpu.run import HopperForward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import WideTiles
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch
from jflash._backends.nvidia.packing import may_pack
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import logits
from jflash._backends.nvidia.tile.logits import LogitsForm
from jflash._backends.nvidia.walk import tile_range, work_items
from jflash._semantics.spec import Spec

HALVES = 2
"""Halves of the values' columns: each has a warpgroup."""

WEIGHTS = HALVES
"""The number of the warpgroup that makes P, among those that sum columns of the output."""

ITEMS = "items"
"""The name of the lists of items among the kernel's arrays."""

PAIR = "pair"
"""The axis of the two CTAs that share what they copy."""

_SWIZZLE = 64
"""Columns of 16 bits in the widest swizzle."""

_MOST_OF_HALF = 256
"""Columns of O that the registers of a warpgroup hold."""

_MOST_SUMMED = 192
"""Columns of values that one product weighs. Its sums are half as many registers of the 128 that ptxas counts on where
a CTA has 512 threads."""

_ITEM_TIME = 0.3
"""How long a work item takes beside its tiles, in visits to a tile of keys."""

_FEW_ROWS = 1024
"""Rows of a head up to which its blocks run together."""

_MOST_DEALT = 2**15
"""The most work items that are dealt out: they are a constant of the program."""


class Registers(NamedTuple):
    """Registers of each thread of each kind of warpgroup; of all four warpgroups 512 together."""

    weights: int
    weigh: int
    copy: int


class Columns(NamedTuple):
    """Columns of the output that one product sums."""

    first: int
    width: int


@dataclasses.dataclass(frozen=True)
class WideForwardPlan(ForwardPlan):
    """A wide call's forward, known before any array; the output leaves from registers."""

    shares_tiles: ClassVar[bool] = False
    """Whether both products read one copy of a tile."""

    tile: WideTiles
    in_pairs: bool = False
    """Whether CTAs of neighbouring blocks share the tiles that they copy."""
    dealt: Lists | None = None
    """The work items of each CTA; `None`: each has one."""

    @property
    def form(self) -> LogitsForm:
        return logits.form(self.spec, sums_in_parts=True)

    @property
    def registers(self) -> Registers:
        """What each kind of warpgroup has: half of O takes up to 144, and P 16 for each piece."""
        most = 512 if facts_of(self.spec).pieces == 1 else 384
        if cache_rows.mends(self.spec):
            # The one that copies looks up pages, and clears padding.
            return Registers(104, 176, 56)
        has_few_sums = whole_dims(self.spec)[1] <= most or self.shares_tiles
        return Registers(136, 176, 24) if has_few_sums else Registers(104, 192, 24)

    @property
    def lists_run_together(self) -> bool:
        return super().lists_run_together or (self.is_plain and self.rows <= _FEW_ROWS)

    @property
    def key_chunks(self) -> ColumnChunks:
        """How tiles of keys are divided."""
        return _key_chunks(self.spec, self.tile.keys)

    @property
    def value_chunks(self) -> int:
        return _value_chunks(self.spec)[0]

    @property
    def columns(self) -> int:
        return _value_chunks(self.spec)[1]

    @property
    def sums(self) -> tuple[tuple[Columns, ...], ...]:
        """The columns of the output that each warpgroup sums: of both halves, and of the one that makes P."""
        chunks = [Columns(chunk * self.columns, self.columns) for chunk in range(self.value_chunks)]
        return *itertools.batched(chunks, self.value_chunks // HALVES), ()

    @property
    def stored(self) -> tuple[int, int]:
        if self.shares is None and self.division.pieces > 0:
            return super().stored
        rows = self.spec.query_length if self.packed_heads > 1 else self.schedule.blocks * self.rows_of_a_range
        return rows, self.value_chunks * self.columns

    @property
    def rows_of_a_range(self) -> int:
        return self.tile.rows * (2 if self.in_pairs else 1)

    @property
    def smem(self) -> Buffers:
        return shared_memory(self.spec, self.tile, in_pairs=self.in_pairs)

    def arrays(self, call: HopperForward) -> dict[str, Array]:
        dealt = {} if self.dealt is None else {ITEMS: forward_schedule.table(self.dealt)}
        return super().arrays(call) | dealt

    @property
    def launch(self) -> Launch:
        launch, cluster = super().launch, {PAIR: 2} if self.in_pairs else {}
        grid = launch.grid if self.dealt is None else dict.fromkeys(launch.grid, 1) | dict(block=len(self.dealt))
        return dataclasses.replace(launch, grid=grid, cluster=cluster, warpgroups=2 + HALVES)


@dataclasses.dataclass(frozen=True)
class LatentForwardPlan(WideForwardPlan):
    """The forward of a call whose values are its keys, known before any array."""

    shares_tiles = True

    @property
    def value_chunks(self) -> int:
        return 1

    @property
    def columns(self) -> int:
        return self.key_chunks.columns

    @property
    def sums(self) -> tuple[tuple[Columns, ...], ...]:
        """Each half has as many columns as registers hold, and the warpgroup that makes P those that are left."""
        columns, width = self.columns, self.key_chunks.width
        starts = *range(0, columns, _MOST_OF_HALF), columns
        cuts = sorted({*range(0, columns, width), *starts})
        parts = [Columns(first, stop - first) for first, stop in itertools.pairwise(cuts)]
        owned = lambda start, stop: tuple(part for part in parts if start <= part.first < stop)
        own = [owned(*pair) for pair in itertools.pairwise(starts)]
        return *own, *[()] * (HALVES + 1 - len(own))

    @property
    def smem(self) -> Buffers:
        return latent_shared_memory(self.spec, self.tile)


def _key_chunks(spec: Spec, keys: int) -> ColumnChunks:
    """How a tile of keys is divided: into chunks of 16 to 24 KiB, which of 128 keys have few columns."""
    columns = round_up(whole_dims(spec)[0], 32)
    return ColumnChunks.of(spec, columns, 64) if keys > 64 else ColumnChunks.of(spec, columns)


def _value_chunks(spec: Spec) -> tuple[int, int]:
    """How many chunks the values' columns make, and the columns of each."""
    value_dim = whole_dims(spec)[1]
    number = HALVES * pl.cdiv(value_dim, HALVES * _MOST_SUMMED)
    return number, round_up(value_dim, 16 * number) // number


def shared_memory(spec: Spec, tile: WideTiles, *, in_pairs: bool = False) -> Buffers:
    """The buffers, and barriers: `full` when something has arrived or was stored, `empty` when all have read it."""
    (head_dim, value_dim), tiles, chunks = whole_dims(spec), CallTiles.of(spec), _key_chunks(spec, tile.keys)
    cluster = PAIR if in_pairs else None
    q = tiles.operand((1, WARPGROUP_ROWS, chunks.columns), head_dim, chunk=chunks.width)
    number, columns = _value_chunks(spec)
    values, bias = (tile.stages, tile.value_keys, columns), (1, tile.rows, tile.keys)
    parts, mends = cache_rows.parts(spec, tile.value_keys), cache_rows.mends(spec)
    ring = lambda: tiles.ring(values, value_dim, readers=1, parts=parts, mends=mends, cluster=cluster)
    return Buffers(
        q_o=smem.reused(q, None),
        q_full=smem.barriers(1, arrivals=smem.copies(q)),
        keys=chunks.ring(spec, tile.chunk_slots, tile.keys, head_dim, readers=1, cluster=cluster),
        values=[ring() for _ in range(number)],
        biases=[smem.ring(smem.tile(bias, spec.bias_dtype), readers=1)] if facts_of(spec).has_bias_tiles else [],
        # What the warpgroup that makes P hands to those that weigh.
        handed=Buffers(
            p=tiles.operand((WARPGROUP_ROWS, tile.keys)),
            rescale=smem.vectors(WARPGROUP_ROWS),
            statistics=smem.vectors(2, WARPGROUP_ROWS),
            full=smem.barriers(1),
            empty=smem.barriers(1, arrivals=HALVES),
        ),
    )


def latent_shared_memory(spec: Spec, tile: WideTiles) -> Buffers:
    """The buffers and barriers of a `LatentForwardPlan`: without values, and all read the keys."""
    chunks = _key_chunks(spec, tile.keys)
    readers, mends = 1 + HALVES, cache_rows.mends(spec)
    keys = chunks.ring(spec, tile.chunk_slots, tile.keys, whole_dims(spec)[0], readers=readers, mends=mends)
    return Buffers(**vars(shared_memory(spec, tile)) | dict(keys=keys, values=[]))


def _is_latent(spec: Spec, packed_heads: int, blocks: int) -> bool:
    """Whether a call has few queries, and keys of 16 bits that are its values. With fewer columns it is no faster."""
    least = HALVES * _MOST_OF_HALF
    is_one_array = spec.value_is_key and spec.head_dim in (least, least + _SWIZZLE) and facts_of(spec).pieces == 1
    return is_one_array and (packed_heads > 1 or blocks == 1)


def plan_forward(spec: Spec, processors: int | None) -> WideForwardPlan:
    """The plan of a wide call's forward on a device with `processors` multiprocessors; `None` where that is unknown."""
    packed_heads = 1
    if may_pack(spec):
        # As many heads as end where a block does.
        one_block = spec.query_length * spec.group <= WARPGROUP_ROWS
        packed_heads = spec.group if one_block else math.gcd(spec.group, WARPGROUP_ROWS)
    heads, blocks = spec.heads // packed_heads, pl.cdiv(spec.query_length * packed_heads, WARPGROUP_ROWS)
    is_latent = _is_latent(spec, packed_heads, blocks)
    kind, tile = (LatentForwardPlan if is_latent else WideForwardPlan), _choose_tiles(spec, blocks, is_latent=is_latent)
    division = work_items.divide(spec, heads, blocks, tile.keys, processors, KEYS_OF_A_SPLIT)
    # Where all see the same, CTAs read the same at the same time anyway, and the cache answers them together.
    # A page's part of a tile is not halved.
    may_pair = packed_heads == 1 < blocks and tile_range.blocks_grow(spec) and spec.pages is None
    in_pairs = may_pair and division.pieces == 0
    schedule = ForwardSchedule(pl.cdiv(blocks, 2) if in_pairs else blocks, spec.batch, heads)
    plan = kind(spec, tile, division, schedule, packed_heads, in_pairs=in_pairs)
    return dataclasses.replace(plan, dealt=_deal(plan, processors))


def _deal(plan: WideForwardPlan, processors: int | None) -> Lists | None:
    """The work items of each pair of CTAs, if one has several and it is known what they visit.

    Not where all blocks see the same, as CTAs with lists come to read at different times; nor with three pieces of
    float32, which were slower.
    """
    spec, pairs = plan.spec, None if processors is None else max(1, processors // 2)
    heads, entries, turns = map(range, (plan.heads, spec.batch, plan.schedule.blocks))
    items = len(heads) * len(entries) * len(turns)
    suits = plan.in_pairs and _limits_are_known(spec) and facts_of(spec).pieces < 3
    if pairs is None or not suits or not pairs < items <= _MOST_DEALT:
        return None
    # In the order of a grid's CTAs.
    if plan.lists_run_together:
        places = itertools.product(heads, entries, turns)
    else:
        places = ((head, entry, turn) for head, turn, entry in itertools.product(heads, turns, entries))
    visits = visited_tiles(spec, plan.packed_heads, plan.rows_of_a_range, plan.tile.keys)
    return forward_schedule.deal(tuple(places), tuple(_ITEM_TIME + count for count in reversed(visits)), pairs)


def _limits_are_known(spec: Spec) -> bool:
    """Whether what is seen is known before the call, but for a mask of one axis."""
    return not facts_of(spec).has_lists and spec.operands.isdisjoint({"query_offset", *tile_range.HIDING})


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles of a forward."""
    return any(_candidates(spec, functools.partial(shared_memory, spec), few_rows=True))


def _choose_tiles(spec: Spec, blocks: int, *, is_latent: bool) -> WideTiles:
    rows_kind = "latent" if is_latent else "short" if blocks == 1 else "long"
    facts = *whole_dims(spec), facts_of(spec).bias_tile_bytes, rows_kind, *facts_of(spec).tuned_pieces
    room = functools.partial(latent_shared_memory if is_latent else shared_memory, spec)
    candidates = tuple(_candidates(spec, room, few_rows=is_latent or blocks == 1))
    tile = smem.choose_tiles("wide forward", facts, candidates, room)
    assert tile is not None, "`fits` says so"
    return tile


def _candidates(spec: Spec, room: Callable[[WideTiles], Buffers], *, few_rows: bool) -> Iterator[WideTiles]:
    """Tiles, the best first, each with as many chunks as shared memory has room for, of up to two whole tiles.

    With 128 keys a product of S reads less of Q. They need registers, for as many logits; and at both ends of a window
    a block's rows see parts of two tiles.
    """
    is_plain = facts_of(spec).is_plain and spec.dropout_rate == 0 and _limits_are_known(spec) and spec.bounds[0] is None
    few_columns = whole_dims(spec)[1] <= 512 and not facts_of(spec).is_float32
    sizes = (128, 64) if is_plain and few_columns and not few_rows else (64,)
    for keys, stages in itertools.product(sizes, (2, 1)):
        chunks = _key_chunks(spec, keys)
        # One more tile of values is not worth a chunk of keys.
        least = chunks.number if stages > 1 else chunks.least
        tiles = (WideTiles(1, keys, stages, slots) for slots in range(2 * chunks.number, least - 1, -1))
        yield from itertools.islice((tile for tile in tiles if smem.fits(room(tile))), 1)
