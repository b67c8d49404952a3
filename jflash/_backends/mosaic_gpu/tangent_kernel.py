"""Tangent: a CTA owns some rows of queries and walks over the tiles of keys that they can see, with tQ, tK and tV.

    each consumer warpgroup, on 64 rows of queries, for each tile of keys:
      S   = Q K^T
      tS  = tQ K^T + Q tK^T          the matrix unit runs this, while the warpgroup goes on with
      P   = exp(S - lse)
      l   = l + rowsum(P);  c' = rowsum(P tS of all tiles so far) / l
      tO  = tO + (c - c') O          so that all tiles before are about the new mean, too
      O   = O + P V;  tO = tO + P tV + (P (tS - c')) V;  c = c'
    tO = tO / l;  tlse = c
    the producer warpgroup copies tiles of keys and values, and of their tangents, ahead of them into shared memory

tS is pushed through what else shapes logits, with its tangents. A sink is a key of which l and the first c know, and
that has no value. Dropout takes from P what it drops when l and c are known. What does not move has no product.

tO has no large terms that cancel: what is rounded is P (tS - c), about the mean of what was seen, as plain attention
has it about the whole mean. In P tS - tlse P, the published form, both are rounded, and may be much larger than their
difference (`xla.tangent`). O is accumulated again, as the residual is rounded. l is 1 but for the rounding of lse.

Sources: Cheng Lu and Yang Song, arXiv:2410.11081, appendix F, one sweep without c; FlashAttention-3, arXiv:2407.08608,
section 3.1 (warp specialisation). The running mean is as in Welford's update of a weighted mean (Technometrics, 1962).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import array_shapes, piece_products, pipeline, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims, whole_dims
from jflash._backends.mosaic_gpu.cta import QueryRowsCta, QueryRowsPlan, Walked, in_place_of_queries
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.run import HopperTangent
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.mosaic_gpu.tiles import RowTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Rows, Tile, along_rows
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile import dropped, logits, operand_pieces, softmax
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.backward_schedule import BackwardSchedule, WorkItem
from jflash._backends.nvidia.walk.tile_range import TileContext, VisitedTile
from jflash._semantics import score_mod_reads
from jflash._semantics.spec import Spec
from jflash._semantics.tile import PARAMETERS

MOVING = frozenset({"query", "key", "value", "sinks", "score_mod_arrays", *PARAMETERS})
"""Operands whose tangents the kernel takes."""

SMALLEST_TILE = RowTiles(1, 64, 1)

_WIDTHS = (128, 64, 32)
"""Columns of the output that a CTA may take: with those of its tangent they fill registers."""


@dataclasses.dataclass(frozen=True)
class TangentPlan(QueryRowsPlan):
    """A call's tangent, known before any array."""

    moving: frozenset[str]
    """The operands that have a tangent."""
    chunks: int
    """Chunks of the output's columns, of CTAs of their own, which each make the logits again. In device memory a chunk
    is a head: columns are split as heads are."""

    def with_tangent(self, name: str) -> tuple[str, ...]:
        """Return the names of an array and, if it has one, of its tangent."""
        return (name, f"t_{name}") if name in self.moving else (name,)

    @property
    def biases(self) -> tuple[str, ...]:
        """The arrays whose tiles are copied: the bias, if it has both axes, and its tangent."""
        return self.with_tangent("bias") if facts_of(self.spec).has_bias_tiles else ()

    @property
    def chunk(self) -> Spec:
        """The spec in which a chunk's columns are all."""
        spec = dataclasses.replace(self.spec, value_dim=pl.cdiv(self.spec.value_dim, self.chunks))
        return dataclasses.replace(spec, value_dim=whole_dims(spec)[1])

    @property
    def dims(self) -> tuple[int, int]:
        """H, and D of a chunk, as copies of tiles want them."""
        return whole_dims(self.spec)[0], self.chunk.value_dim

    @property
    def columns(self) -> int:
        """Columns of a chunk's tiles."""
        return tile_dims(self.chunk)[1]

    def arrays(self, call: HopperTangent) -> dict[str, Array]:
        names = [name for operand in ("query", "key", "value") for name in self.with_tangent(operand)]
        factors = call.factors(self.chunks, self.chunk, names)
        shaping = (
            call.others | call.moved_others | call.packed_mask() | array_shapes.edges(self.spec, call.operands, factors)
        )
        return factors | shaping | call.visits(self.visits) | dict(lse=call.lse)

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        t_out = made["t_out"][:, : self.spec.query_length, :, : self.dims[1]]
        return made | dict(t_out=t_out.reshape(*t_out.shape[:2], self.spec.heads, -1))

    @property
    def launch(self) -> Launch:
        """The launch, whose tangent of the output is `[B, T, N * chunks, D]`."""
        spec, (head_dim, value_dim) = self.spec, self.dims
        return Launch(
            name=f"jflash_tangent_{head_dim}_{value_dim}",
            grid=self.schedule.grid,
            results=dict(
                t_out=self.result(self.chunk, spec.heads * self.chunks, 1),
                t_lse=jax.ShapeDtypeStruct((spec.batch, spec.heads, self.all_rows), jnp.float32),
            ),
            smem=self.shared_memory(self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )

    def shared_memory(self, tile: RowTiles) -> Buffers:
        """Return the kernel's buffers and barriers: `full` when a copy has arrived, `empty` when all have read it."""
        spec, (head_dim, value_dim), (columns, value_columns) = self.chunk, self.dims, tile_dims(self.chunk)
        tiles_of, rows = CallTiles.of(spec), (tile.warpgroups, WARPGROUP_ROWS)
        q, out = tiles_of.operand((*rows, columns), head_dim), tiles_of.result((*rows, value_columns), value_dim)

        def ring(operand: str, columns: int, dim: int, others: int = 0) -> Buffers:
            tiles = dict.fromkeys(self.with_tangent(operand), tiles_of.operand((tile.stages, tile.keys, columns), dim))
            full = smem.barriers(tile.stages, arrivals=smem.copies(*tiles.values()) + others)
            return Buffers(tiles=tiles, full=full, empty=smem.barriers(tile.stages, arrivals=tile.warpgroups))

        return Buffers(
            **in_place_of_queries(spec, q, out, tile.warpgroups),
            t_q=q if "query" in self.moving else None,
            rows_full=smem.barriers(tile.warpgroups, arrivals=smem.copies(q) * len(self.with_tangent("query"))),
            k=ring("key", columns, head_dim, len(self.biases)),
            v=ring("value", value_columns, value_dim),
            # They come and go with the keys.
            biases={name: smem.tile((tile.stages, tile.rows, tile.keys), spec.bias_dtype) for name in self.biases},
        )


def plan_tangent(spec: Spec, moving: frozenset[str], processors: int | None) -> TangentPlan:
    """Return the plan of a call's tangent on a device with `processors` multiprocessors; `None` is unknown."""
    plan = _smallest(spec, moving)
    assert plan is not None
    tile = _choose_tile(plan)
    heads, blocks = spec.heads * plan.chunks, pl.cdiv(spec.query_length, tile.rows)
    schedule = BackwardSchedule.of(spec, heads, heads, blocks, processors)
    return dataclasses.replace(plan, tile=tile, schedule=schedule)


def fits(spec: Spec) -> bool:
    """Whether shared memory has room for the smallest tiles, whatever moves."""
    return _smallest(spec, MOVING & spec.operands) is not None


def _smallest(spec: Spec, moving: frozenset[str]) -> TangentPlan | None:
    """Return the plan with the smallest tile, and the fewest chunks with which that fits."""
    widths = _WIDTHS[1:] if facts_of(spec).is_float32 else _WIDTHS
    schedule = BackwardSchedule(1, 1, 1, spec.batch, 1, 1)
    every = (TangentPlan(spec, SMALLEST_TILE, schedule, moving, pl.cdiv(spec.value_dim, w)) for w in widths)
    return next((plan for plan in every if smem.fits(plan.launch.smem)), None)


def _choose_tile(plan: TangentPlan) -> RowTiles:
    """Return the fastest tile that fits in shared memory and registers."""
    spec = plan.spec
    warpgroups = 1 if spec.query_length <= WARPGROUP_ROWS else 2
    is_masked = tile_range.is_limited(spec) or spec.key_length % 128 != 0
    sizes = [(warpgroups, 64, 2), (warpgroups, 64, 1), (1, 64, 2), (1, 64, 1)]
    if max(plan.dims) <= 64 and not facts_of(spec).is_float32 and facts_of(spec).is_plain:
        deep, wide, three = (warpgroups, 64, 4), (warpgroups, 128, 2), (3, 64, 3)
        # Of 128 keys, a tile that needs a mask leaves too few registers.
        sizes = [deep, wide, three, *sizes] if is_masked else [wide, deep, three, *sizes]
    facts = *plan.dims, facts_of(spec).bias_tile_bytes, *facts_of(spec).tuned_pieces, int(is_masked)
    candidates = [RowTiles(*size) for size in sizes]
    tile = smem.choose_tiles("tangent", (*facts, *sorted(plan.moving)), candidates, plan.shared_memory)
    assert tile is not None, "`fits` says so"
    return tile


class _Sums(NamedTuple):
    """What a warpgroup has summed over keys."""

    t_out: Float[Array, "rows D"]
    out: Float[Array, "rows D"]
    l: Rows
    p_ts: Rows

    @property
    def mean(self) -> Rows:
        """The mean of tS, weighted by P."""
        return self.p_ts / jnp.where(self.l == 0, 1.0, self.l)


class TangentCta(QueryRowsCta[TangentPlan]):
    """A CTA of the tangent. An array's tangent has its name, with `t_` before it."""

    def __init__(self, plan: TangentPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        moving = {name.removeprefix("t_"): ref for name, ref in refs.arrays.items() if name.startswith("t_")}
        self.tangents = dataclasses.replace(self.inputs, refs=moving)
        self.queries = dict(query=self.q) | ({} if refs.smem.t_q is None else dict(t_query=refs.smem.t_q))
        pairs = dict(query=("t_query", "key"), key=("query", "t_key"))
        self.moved_products = [pair for name, pair in pairs.items() if name in plan.moving]

    def take(self, plan: TangentPlan, item: WorkItem) -> None:
        # With a head of keys for each chunk of a query head, a head group is one of those.
        self.batch, self.chunk_head = item.batch, item.head_group
        self.head, self.chunk = lax.div(item.head_group, plan.chunks), lax.rem(item.head_group, plan.chunks)

    def compute(self) -> None:
        """Copy this warpgroup's queries, and walk over the tiles of keys."""
        plan, results = self.plan, self.refs.results
        (lse,) = self.begin(self.queries, "lse")
        visit = lambda index, sums: self._visit(index, lse, sums)
        sums = lax.fori_loop(0, self.tiles.count, visit, self._start(lse))

        @pl.when(self.chunk == 0)
        def _() -> None:
            results["t_lse"][self.batch, self.head, self.query_rows] = sums.mean

        factor = dropped.scaled(plan.spec, 1 / jnp.where(sums.l == 0, 1.0, sums.l))
        t_out = sums.t_out * along_rows(factor, sums.t_out.shape)
        self.store_in_place(t_out, results["t_out"], self.chunk_head)

    def _start(self, lse: Rows) -> _Sums:
        """Return the sums before any key; a sink has a share of the weights."""
        spec, inputs = self.plan.spec, self.inputs
        zeros = lambda: self.ops.full((WARPGROUP_ROWS, self.plan.columns), 0)
        l = self.ops.full((WARPGROUP_ROWS,), 0)
        sink, t_sink = (each.value("sinks", self.batch, self.head) for each in (inputs, self.tangents))
        if sink is not None:
            l = dataclasses.replace(softmax.exponent(spec), factor=softmax.LOG2_E)(sink, lse)
        return _Sums(zeros(), zeros(), l, l * (0.0 if t_sink is None else t_sink))

    def _visit(self, index: Array, lse: Rows, sums: _Sums) -> _Sums:
        """Return the sums with those of one tile."""
        plan, spec, shared, ops = self.plan, self.plan.spec, self.smem, self.ops
        slot = lax.rem(index, plan.tile.stages) + pipeline.opaque_zero(index, self.warpgroup)
        visited = self.tiles.tile(index)
        at = TileCoord(self.batch, self.head, self.warpgroup_row, visited.start)
        p, ts = self._probabilities(index, visited, slot, at, lse)
        if shared.biases:
            # A copy may overwrite what threads have read.
            plgpu.commit_smem()
        plgpu.barrier_arrive(shared.k.empty.at[slot])

        l, p_ts = sums.l + p.sum(axis=1), sums.p_ts + (p * ts).sum(axis=1)
        new = sums._replace(l=l, p_ts=p_ts)
        t_out = sums.t_out + along_rows(sums.mean - new.mean, sums.out.shape) * sums.out
        kept = dropped.keep(self.inputs, at, p)
        # Before any product is issued: ptxas serialises products if registers that one reads are written among them.
        centred = operand_pieces.split(spec, kept * (ts - along_rows(new.mean, ts.shape)), ops)
        weights = operand_pieces.split(spec, kept, ops)
        plgpu.barrier_wait(shared.v.full.at[slot])

        def weigh(acc_t_out: Any, acc_out: Any) -> None:
            v = {name: piece_products.of_tile(spec, ref.at[slot]) for name, ref in shared.v.tiles.items()}
            piece_products.mma(acc_out, weights, v["value"], ops)
            piece_products.mma(acc_t_out, centred, v["value"], ops)
            if "t_value" in v:
                piece_products.mma(acc_t_out, weights, v["t_value"], ops)

        _, (t_out, out) = piece_products.accumulate(spec, weigh, t_out, sums.out, like=None, ops=ops)
        plgpu.barrier_arrive(shared.v.empty.at[slot])
        return new._replace(t_out=t_out, out=out)

    def _probabilities(
        self, index: Array, visited: VisitedTile, slot: Array, at: TileCoord, lse: Rows
    ) -> tuple[Tile, Tile]:
        """Return P and tS of a tile."""
        plan, spec, shared, ops = self.plan, self.plan.spec, self.smem, self.ops
        shape, moved = (WARPGROUP_ROWS, plan.tile.keys), self.moved_products
        parameters = [name for name in PARAMETERS if name in plan.moving]
        if "score_mod_arrays" in plan.moving:
            parameters += [read.name for read in score_mod_reads.smooth(spec)]
        packed = self.inputs.load_packed_mask(at, shape)
        plgpu.barrier_wait(shared.k.full.at[slot])

        def make(acc_s: Any, acc_ts: Any = None) -> tuple[Tile, Tile]:
            opaque_index = self.warpgroup + pipeline.opaque_zero(index, self.warpgroup)
            pieces = functools.partial(piece_products.of_tile, spec)
            q = {name: pieces(ref.at[opaque_index]) for name, ref in self.queries.items()}
            k = {name: operand_pieces.transposed(pieces(ref.at[slot])) for name, ref in shared.k.tiles.items()}
            piece_products.mma(acc_s, q["query"], k["key"], ops)
            for left, right in moved:
                piece_products.mma(acc_ts, q[left], k[right], ops)
            pending = sum(piece_products.issued(k[right]) for _, right in moved)
            bias = lambda name: (
                {"bias": ops.load(shared.biases[name].at[slot, self.warpgroup_rows])} if name in shared.biases else {}
            )
            loaded = packed | bias("bias")
            s = ops.read(acc_s, pending=pending)
            mask = TileContext(self.inputs, visited, at, loaded)
            to_p = lambda logits: softmax.exponent(spec)(logits, along_rows(lse, shape))
            p, push = logits.linearize(s, mask, to_p, parameters)
            ts = ops.read(acc_ts) if moved else ops.full(shape, 0)
            along = logits.parameter_tangents(self.tangents, mask, shape, bias("t_bias"), parameters)
            return p, push(ts, along)

        return ops.accumulators(make, *[shape] * (1 + bool(moved)))

    def walked(self) -> Sequence[Walked]:
        shared = self.smem
        return (shared.k, shared.k.tiles | shared.biases), (shared.v, shared.v.tiles)

    def walked_head(self, name: str, key_head: Any) -> Any:
        return key_head * self.plan.chunks + self.chunk if name in ("value", "t_value") else key_head
