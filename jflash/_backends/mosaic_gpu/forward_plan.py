"""A call's forward before any array: packed heads, tiles, how walks are divided, schedule, shared memory, launch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash._backends.mosaic_gpu import array_shapes, bf16_columns, converted_tile, forward_schedule, smem
from jflash._backends.mosaic_gpu.array_shapes import block_dims, forward_in_panels, tile_dims, values_in_panels
from jflash._backends.mosaic_gpu.forward_schedule import Choice, Device, ForwardSchedule
from jflash._backends.mosaic_gpu.run import HopperForward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import (
    KEYS_OF_THREE_WARPGROUPS,
    LONGER_WHERE_UNTIMED,
    PACES,
    SAVED_IN_PLACE,
    Pace,
    RowTiles,
    Visits,
    block_times,
)
from jflash._backends.nvidia import cache_rows, merge
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import KernelPlan, Launch
from jflash._backends.nvidia.packing import ForwardShape, packs
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.logits import LogitsForm
from jflash._backends.nvidia.walk import tile_range, work_items
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import Division, Shares, Splits
from jflash._semantics.spec import Spec

SMALLEST_TILE = RowTiles(1, 64, 1)

KEYS_OF_A_SPLIT = 256
"""Minimum keys per split."""

_WIDEST_OF_FOUR = 192
"""The most columns for which a CTA of four warpgroups may have two that compute."""


def shared_memory(spec: Spec, tile: RowTiles, output_stores: int = 0) -> Buffers:
    """The kernel's buffers, and barriers: `full` when a copy has arrived, `empty` when all readers are done."""
    from_registers = spec.partial or packs(spec)
    columns, value_columns = tile_dims(spec)
    has_bias_tiles, bias_by_mma = facts_of(spec).has_bias_tiles, bf16_columns.form(spec).bias_by_mma
    tiles, value_tiles = CallTiles(spec, forward_in_panels(spec)), CallTiles(spec, values_in_panels(spec))
    q = tiles.operand((tile.warpgroups, WARPGROUP_ROWS, columns))
    o_shape = tile.warpgroups, WARPGROUP_ROWS, value_columns // max(1, output_stores)
    o = smem.tile(o_shape, spec.result_dtype, in_panels=tiles.in_panels)
    staged = converted_tile.buffers(spec, tile.keys)
    parts = cache_rows.parts(spec, tile.keys) if staged is None else 1
    read_by_all = dict(readers=tile.warpgroups, parts=parts)
    # The conversion clears padding itself, before it fills the ring.
    mends = cache_rows.mends(spec) and staged is None
    return Buffers(
        # The output takes the place of the queries, or has a buffer of its own. That of packed heads, or of a partial
        # call, leaves from registers.
        q_o=(q, o) if output_stores else smem.reused(q, None if from_registers else o),
        q_full=smem.barriers(tile.warpgroups, arrivals=smem.copies(q)),
        k=tiles.ring((tile.stages, tile.keys, columns), **read_by_all, others=has_bias_tiles + bias_by_mma),
        v=value_tiles.ring((tile.stages, tile.keys, value_columns), **read_by_all, mends=mends),
        staged=staged,
        # What there is of a bias comes and goes with the keys: its tiles, or columns that the matrix unit adds.
        bias=smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) if has_bias_tiles else None,
        bias_columns=bf16_columns.smem_tile(tile.stages, tile.keys) if bias_by_mma else None,
        q_empty=smem.barriers(1, arrivals=tile.warpgroups),
        # A number for each row that is stored as a scheduling fence, and never read.
        fence=smem.vectors(tile.warpgroups, WARPGROUP_ROWS),
    )


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardShape, KernelPlan):
    """A call's forward, known before any array."""

    tile: RowTiles
    division: Division
    schedule: ForwardSchedule
    packed_heads: int = 1
    """Query heads that share keys and are interleaved in the rows of one tile."""
    output_stores: int = 0
    """Stores in which the output leaves from a buffer of its own; 0: it takes the place of the queries."""

    @property
    def queries_stay(self) -> bool:
        """Whether the output leaves the place of the queries to the next ones."""
        return self.output_stores > 0 or self.stores_registers

    @property
    def row_by_row(self) -> bool:
        """Whether rows of queries and output are read and stored one by one: those of packed heads lie apart, and those
        of tokens beside another entry's."""
        return self.packed_heads > 1 or self.spec.tokens is not None

    @property
    def stores_registers(self) -> bool:
        """Whether the output leaves from registers: a partial call's is float32, others are stored row by row."""
        return self.spec.partial or self.row_by_row

    @property
    def rows_lie_together(self) -> bool:
        """Whether a warpgroup's rows are an array's: of one head, or all of them heads of a single query."""
        if self.spec.tokens is not None:
            return False
        return self.packed_heads == 1 or (self.spec.query_length == 1 and self.packed_heads % WARPGROUP_ROWS == 0)

    @property
    def form(self) -> LogitsForm:
        """The form of the logits."""
        few_registers = self.tile.warpgroups > 3 or self.columns >= 256 or self.spec.dropout_rate > 0
        return bf16_columns.form(self.spec, sums_in_parts=not few_registers)

    @property
    def is_plain(self) -> bool:
        """Whether logits are products, and no weight is dropped."""
        return facts_of(self.spec).is_plain and self.spec.dropout_rate == 0

    @property
    def value_chunks(self) -> int:
        """Chunks of the values' columns that are copied apart."""
        return 1

    @property
    def columns(self) -> int:
        """Columns of the output that a warpgroup sums at a time."""
        return tile_dims(self.spec)[1]

    @property
    def overlaps(self) -> bool:
        """Whether a tile's P V runs beside the next tile's softmax.

        Products of three pieces have a second accumulator, in which they begin at zero. If it has more than 64
        columns, both and P's pieces leave no registers for S.
        """
        return facts_of(self.spec).pieces < 3 or self.columns <= 64

    @property
    def orders_products(self) -> bool:
        """Whether warpgroups issue their products in turns.

        Three share the matrix unit so that each finds it free after its softmax. Of two, one's products run beside the
        other's softmax anyway, and of four, some visit fewer tiles.
        """
        return self.tile.warpgroups == 3 and self.overlaps

    @property
    def query_columns_in_registers(self) -> int:
        """The first columns of a warpgroup's queries that stay in registers, so that products read less shared memory.

        Where registers are left and heads are wide: not beside the indices of a mask, or a place among several items.
        """
        spec = self.spec
        is_masked = tile_range.is_limited(spec) or spec.key_length % self.tile.keys != 0 or "mask" in spec.operands
        in_blocks = facts_of(spec).pieces == 1 and not forward_in_panels(spec)
        fits = spec.head_dim in (192, 256) and in_blocks and self.schedule.items_per_cta == 1
        return 128 if fits and self.is_plain and not is_masked else 0

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of a head's output in device memory."""
        if self.row_by_row or self.division.pieces > 0:
            return self.out_rows[1], round_up(self.spec.value_dim, 8)
        if self.spec.partial:
            # Registers, from which a partial call's leaves, are stored whole.
            return self.schedule.blocks * self.tile.rows, self.columns
        if forward_in_panels(self.spec):
            return self.rows, array_shapes.panel_dim(self.spec.value_dim)
        return round_up(self.rows, 8), block_dims(self.spec)[1]

    @property
    def smem(self) -> Buffers:
        """The kernel's shared memory."""
        return shared_memory(self.spec, self.tile, self.output_stores)

    @property
    def lists_run_together(self) -> bool:
        """Whether all blocks of a list run at about the same time, and not the long ones of all lists first."""
        return self.is_plain and not tile_range.blocks_grow(self.spec)

    @property
    def rows_of_a_range(self) -> int:
        """Rows for which one range says which keys they see."""
        return self.tile.rows

    @property
    def missing_rows(self) -> int:
        """Rows that the first block of queries lacks."""
        return self.tile.missing(self.rows)

    @property
    def visits(self) -> Blocks:
        """What each block visits a share of."""
        rows, missing = self.rows_of_a_range // self.packed_heads, self.missing_rows // self.packed_heads
        return Blocks(max(rows, 1), self.tile.keys, self.packed_heads, missing)

    def arrays(self, call: HopperForward) -> dict[str, Array]:
        factors = call.factors(self.value_chunks, packed=self.row_by_row)
        mends = cache_rows.mends(self.spec)
        edges = {} if mends else array_shapes.edges(self.spec, call.operands, dict(value=factors["value"]))
        shaping = call.shaping(self.tile.keys if self.form.bias_by_mma else None)
        arrays = factors | shaping | edges | self.sinks(call.operands)
        return arrays | call.visits(self.visits) | call.work(self.visits, self.shares)

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        (rows, columns), all_rows = self.stored, self.schedule.blocks * self.rows_of_a_range
        out = (self.out_rows[0], rows, self.spec.heads, columns)
        lse = jax.ShapeDtypeStruct((self.spec.batch, self.heads, all_rows), jnp.float32)
        return dict(out=jax.ShapeDtypeStruct(out, self.spec.result_dtype), lse=lse)

    @property
    def launch(self) -> Launch:
        """Queries and output are `[B, T, N, D]`.

        With items of work these are what "batch" counts, and all heads of one follow one another: longest walks first.
        """
        schedule, (head_dim, value_dim) = self.schedule, block_dims(self.spec)
        heads, ctas, lists = schedule.grid
        head, inner = dict(head=heads), dict(block=ctas, head_group=schedule.head_groups)
        if isinstance(self.division, Shares):
            grid = dict(batch=self.division.items, block=1, head_group=1) | head
        else:
            grid = head | (dict(batch=lists) | inner if self.lists_run_together else inner | dict(batch=lists))
            grid |= dict(split=self.division.each)
        return Launch(
            name=f"jflash_forward_{head_dim}_{value_dim}",
            grid=grid,
            results=merge.results_of_forward(self),
            smem=self.smem,
            warpgroups=self.tile.warpgroups + (2 if cache_rows.converts(self.spec) else 1),
        )


def plan_forward(spec: Spec, processors: int | None) -> ForwardPlan:
    """The plan of a call's forward on a device with `processors` multiprocessors; `None` where that is unknown."""
    packed_heads = spec.group if packs(spec) else 1
    heads, rows = spec.heads // packed_heads, spec.query_length * packed_heads
    visits = functools.partial(visited_tiles, spec, packed_heads)

    def plan_of(tile: RowTiles) -> ForwardPlan:
        schedule = ForwardSchedule(len(visits(tile.rows, tile.keys)), spec.batch, heads)
        return ForwardPlan(spec, tile, Splits(spec.batch, schedule.blocks), schedule, packed_heads)

    choose = functools.cache(lambda tile: _choose_schedule(plan_of(tile), visits, processors))
    tile = _choose_tiles(spec, rows, visits, lambda tile: choose(tile).time)
    plan = plan_of(tile)
    division = work_items.divide(spec, heads, plan.schedule.blocks, tile.keys, processors, KEYS_OF_A_SPLIT)
    if division.pieces > 0:
        return dataclasses.replace(plan, division=division)
    schedule = choose(tile).schedule
    stores = output_stores(spec, tile) if schedule.items_per_cta > 1 and not plan.stores_registers else 0
    return dataclasses.replace(plan, schedule=schedule, output_stores=stores)


def visited_tiles(spec: Spec, packed_heads: int, rows: int, keys: int) -> list[int]:
    """How many tiles of `keys` keys each block of `rows` rows visits, by what is known before the call."""
    left, right = spec.bounds
    stop_row = np.arange(spec.query_length * packed_heads, 0, -rows)[::-1]
    first, stop = np.maximum(stop_row - rows, 0) // packed_heads, -(-stop_row // packed_heads)
    offset = spec.query_offset or 0
    first_key = np.zeros_like(first) if left is None else np.maximum(first + offset - left, 0)
    stop_key = np.full_like(stop, spec.key_length) if right is None else stop + offset + right
    seen = np.minimum(stop_key, spec.key_length) - first_key
    return np.maximum(-(-seen // keys), 1).tolist()


def _choose_tiles(spec: Spec, rows: int, visits: Visits, time: Callable[[RowTiles], float]) -> RowTiles:
    """Return the fastest tiles that fit, for a head with `rows` of queries, by the `time` of a call with tiles."""
    dims, bias_bytes, few_rows = block_dims(spec), facts_of(spec).bias_tile_bytes, rows <= WARPGROUP_ROWS
    # Beside two warpgroups that convert, ptxas has no registers for wider sums of two others.
    warpgroups = 1 if few_rows or (cache_rows.converts(spec) and max(dims) > _WIDEST_OF_FOUR) else 2
    candidates = [RowTiles(warpgroups, *size) for size in ((128, 2), (64, 2), (64, 1))]
    if facts_of(spec).is_float32:
        # Of 128 keys, P and its pieces leave too few registers.
        candidates = [*candidates[1:], candidates[0], SMALLEST_TILE]
    elif not few_rows and not bias_bytes and (more := _tiles_of_more_warpgroups(spec, visits)):
        timed = spec.dropout_rate == 0 and spec.operands.isdisjoint({"query_segments", "mask", "bias"})
        longer = lambda tile: 1.0 if timed or tile.warpgroups != 3 else LONGER_WHERE_UNTIMED
        candidates = sorted((candidates[0], *more), key=lambda tile: time(tile) * longer(tile))
    if cache_rows.mends(spec):
        # Padding is cleared in blocks of 64 rows.
        suits = lambda keys: keys % WARPGROUP_ROWS == 0 and cache_rows.suits(spec, keys)
        candidates = [tile for tile in candidates if suits(tile.keys)]
    facts = *dims, bias_bytes, "short" if few_rows else "long", *facts_of(spec).tuned_pieces
    tile = smem.choose_tiles("forward", facts, candidates, functools.partial(shared_memory, spec))
    assert tile is not None, "the call is a wide one"
    return tile


def _tiles_of_more_warpgroups(spec: Spec, visits: Visits) -> list[RowTiles]:
    """Tiles of three and four warpgroups, which have 160 and 112 registers a thread for O, P and a tile of logits."""
    (head_dim, value_dim), form = block_dims(spec), bf16_columns.form(spec)
    if spec.mask_mod is not None or cache_rows.converts(spec):
        # The map of a mask function is of tiles of 128 x 128: others visit more than it leaves. And two warpgroups that
        # convert leave registers for two that compute.
        return []
    if max(head_dim, value_dim) <= 64:
        blocks_differ = len(set(visits(4 * WARPGROUP_ROWS, 64))) > 1
        tiles = RowTiles(3, 128, 2), RowTiles(4, 64, 3 if blocks_differ else 4)
        return [tile for tile in tiles if tile.warpgroups <= form.max_warpgroups]
    # What comes in words or columns for whole tiles comes for 64 keys.
    in_words = facts_of(spec).has_packed_mask or form.bias_by_mma or spec.dropout_rate > 0
    keys = KEYS_OF_THREE_WARPGROUPS.get(value_dim)
    if keys is None or in_words or head_dim != value_dim or form.max_warpgroups < 3:
        return []
    if values_in_panels(spec) and keys % max(smem.panels_of(value_dim, spec.dtype)):
        # A product over the rows of panels wants them in squares.
        keys = WARPGROUP_ROWS
    return [RowTiles(3, keys, 2)]


def output_stores(spec: Spec, tile: RowTiles) -> int:
    """In how few stores the output may leave from a buffer of its own; 0 if there is no room for one."""
    possible = (1, 2) if block_dims(spec)[1] % 128 == 0 else (1,)
    fitting = (stores for stores in possible if smem.fits(shared_memory(spec, tile, stores)))
    return next(fitting, 0)


def _choose_schedule(plan: ForwardPlan, visits: Visits, processors: int | None) -> Choice:
    """Return how blocks of queries are dealt out to CTAs, and how long the call takes then."""
    spec, tile, heads = plan.spec, plan.tile, plan.heads
    head_dim, value_dim = block_dims(spec)
    counts, groups = visits(tile.rows, tile.keys), 1
    if tile_range.blocks_grow(spec) and tile.warpgroups > 2:
        # Growing blocks of several heads leave fewer multiprocessors waiting at the end; of few heads, those of all.
        are_few = tile.warpgroups > 3 and spec.batch * heads <= (processors or 0)
        groups = heads if are_few else heads // math.gcd(heads, 8)
    staggered = facts_of(spec).has_lists or not spec.operands.isdisjoint(tile_range.HIDING)
    one = dataclasses.replace(plan.schedule, head_groups=groups, staggered=staggered)
    stores = 1 if plan.queries_stay else output_stores(spec, tile)
    pace = pace_of(spec, tile)
    times = block_times(tile, plan.rows, visits, pace)
    if processors is None or not (stores or head_dim == value_dim):
        return Choice(one, sum(times))
    beginning = pace.beginning * (1 if stores else SAVED_IN_PLACE)
    tile_bytes = tile.keys * (head_dim + value_dim) * facts_of(spec).pieces * 2
    device = Device(processors, beginning, tile_bytes, sum(counts) / len(counts))
    return forward_schedule.choose(one, tuple(reversed(times)), device)


def pace_of(spec: Spec, tile: RowTiles) -> Pace:
    """Return how long a call's tiles take. Those that were not timed are taken to be as fast as two warpgroups'; each
    product of float32 operands is one of their pieces after the other."""
    paces = PACES[next(columns for columns in PACES if max(block_dims(spec)) <= columns)]
    pace = paces.get((tile.warpgroups, tile.keys), next(iter(paces.values())))
    return pace._replace(visit=pace.visit * operand_pieces.products(spec))
