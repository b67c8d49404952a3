"""The tiles of queries that both backwards by blocks of keys walk over, copied ahead of the warpgroups that compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu import statistics, tiles
from jflash._backends.mosaic_gpu.inputs import Inputs, Rows
from jflash._backends.mosaic_gpu.operations import Ref
from jflash._backends.mosaic_gpu.query_order import Order


class Buffers(Protocol):
    """What is filled in shared memory, `[stages, ...]`, and its barriers."""

    @property
    def query(self) -> Ref: ...
    @property
    def d_out(self) -> Ref: ...
    @property
    def bias(self) -> Ref | None: ...
    @property
    def statistics(self) -> Sequence[Ref]: ...
    @property
    def query_filled(self) -> Ref: ...
    @property
    def query_free(self) -> Ref: ...
    @property
    def d_out_filled(self) -> Ref: ...
    @property
    def d_out_free(self) -> Ref: ...


class Sources(NamedTuple):
    """The same in device memory; the columns that a tile takes of queries and of d_out."""

    query: Ref
    d_out: Ref
    statistics: Sequence[Ref]
    """Columns, or vectors of lse and delta: see `statistics`."""
    key_columns: Any
    out_columns: Any


def copy_all(
    call: Inputs,
    order: Order,
    sources: Sources,
    shared: Buffers,
    batch: Int[Array, ""],
    first_head: Int[Array, ""],
    keys: Any,
    then: Callable[[Array], None] = lambda step: None,
    more: int = 0,
) -> None:
    """Every tile, in `order`, of the heads from `first_head` on; `keys` are the block's own.

    `then` is called after each step, and for so many `more` without a tile while the last ones are read.
    """
    stages, queries = shared.query.shape[:2]
    # The same number for the loop and for its remainders: with one head, they are no divisions then.
    count = tiles.unknown(order.walk.count, "block")

    def copy(step: Array) -> None:
        slot = lax.rem(step, stages)
        own_head, index = order.at(step, count)
        head, first = first_head + own_head, order.walk.start(index)
        rows = pl.ds(first, queries)
        tile = Rows(batch, first, queries, head, sources.key_columns)
        plgpu.barrier_wait(shared.query_free.at[slot])
        filled = shared.query_filled.at[slot]
        call.copy_rows("query", sources.query, tile, shared.query.at[slot], filled)
        early, *late = statistics.parts(sources.statistics, batch, head, rows)
        plgpu.copy_gmem_to_smem(early, shared.statistics[0].at[slot], filled)
        if shared.bias is not None:
            plgpu.copy_gmem_to_smem(call.part("bias", batch, head).at[rows, keys], shared.bias.at[slot], filled)
        plgpu.barrier_wait(shared.d_out_free.at[slot])
        filled = shared.d_out_filled.at[slot]
        tile = tile._replace(columns=sources.out_columns)
        call.copy_rows("d_out", sources.d_out, tile, shared.d_out.at[slot], filled)
        for source, target in zip(late, shared.statistics[1:], strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[slot], filled)

    def take(step: Array, carry: int) -> int:
        pl.when(step < count * order.heads)(lambda: copy(step))
        then(step)
        return carry

    lax.fori_loop(0, count * order.heads + more, take, 0)
    tiles.drain(stages, shared.query_free, shared.d_out_free)
