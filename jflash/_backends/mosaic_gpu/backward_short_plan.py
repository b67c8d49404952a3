"""A short call's backward before any array: which heads each CTA takes, shared memory and launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jflash._backends.mosaic_gpu import backward_fused_plan, smem
from jflash._backends.mosaic_gpu.array_shapes import whole_dims, whole_rows
from jflash._backends.mosaic_gpu.backward_fused_plan import QueryWalkPlan
from jflash._backends.mosaic_gpu.smem import CallTiles, Overlaid
from jflash._backends.mosaic_gpu.tiles import ShortTiles
from jflash._backends.nvidia.launch import Launch
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums
from jflash._backends.nvidia.walk.backward_schedule import WorkItem
from jflash._semantics.spec import Spec

_GAIN = 1.2
"""How much longer the other fused kernel takes: as much as multiprocessors may be idle here."""


@dataclasses.dataclass(frozen=True)
class ShortPlan(QueryWalkPlan):
    """One kernel for dQ, dK and dV, whose CTAs have all queries and keys of a head, or of all heads that share keys."""

    tile: ShortTiles
    ctas: int

    @property
    def heads(self) -> int:
        """Query heads of a work item."""
        return self.spec.group

    @property
    def items(self) -> int:
        """Work items: each key head of each batch entry."""
        return self.spec.batch * self.spec.key_heads

    @property
    def dq_parts(self) -> int:
        """Parts of a work item's dQ that warpgroups make: tiles, or halves of them."""
        return dq_parts(self.spec, self.tile)

    @property
    def blocks(self) -> int:
        """Of keys, that a work item has."""
        return pl.cdiv(self.spec.key_length, self.tile.keys)

    @property
    def tiles(self) -> int:
        """Of queries, that a head has."""
        return pl.cdiv(self.spec.query_length, self.tile.queries)

    def item(self, number: Any) -> WorkItem:
        """A work item by its number. Neighbours are heads of one entry: in device memory those are side by side."""
        batch, head = lax.div(number, self.spec.key_heads), lax.rem(number, self.spec.key_heads)
        return WorkItem(batch, head, head, head * self.heads)

    @property
    def launch(self) -> Launch:
        """A CTA for each multiprocessor, or each work item."""
        spec, dims = self.spec, whole_dims(self.spec)

        def array(length: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((spec.batch, whole_rows(spec, length), heads, dim), spec.dtype)

        return Launch(
            name=f"jflash_backward_short_{dims[0]}_{dims[1]}",
            grid=dict(cta=self.ctas),
            results=dict(
                d_query=array(spec.query_length, spec.heads, dims[0]),
                d_key=array(spec.key_length, spec.key_heads, dims[0]),
                d_value=array(spec.key_length, spec.key_heads, dims[1]),
                **self.sums.results(spec.batch, spec.heads, self.blocks * self.tile.keys),
            ),
            smem=shared_memory(spec, self.tile),
            warpgroups=self.tile.warpgroups + 1,
        )


def dq_parts(spec: Spec, tile: ShortTiles) -> int:
    """Parts of a work item's dQ that warpgroups make: tiles, or halves of them."""
    return (tile.warpgroups if tile.halves else 1) * spec.group * pl.cdiv(spec.query_length, tile.queries)


def shared_memory(spec: Spec, tile: ShortTiles) -> Buffers:
    """The kernel's buffers, and barriers."""
    k, v = backward_fused_plan.keys_and_values(spec, tile, tile.key_stages)
    dk, dv = backward_fused_plan.gradients(spec, tile)
    width, dim = backward_fused_plan.dq_width(spec, tile), whole_dims(spec)[0]
    ds = backward_fused_plan.ds(spec, tile)
    # Parts of dQ that are stored at once: as many as have the size of dS.
    slots = max(1, 2 * tile.keys // (tile.warpgroups * width))
    shape = tile.warpgroups, slots, WARPGROUP_ROWS, width
    rounded_dq = CallTiles.of(spec).result(shape, dim)
    return Buffers(
        k=k,
        v=v,
        kv_full=smem.barriers(tile.key_stages, arrivals=smem.copies(k, v)),
        kv_empty=smem.barriers(tile.key_stages, arrivals=tile.warpgroups),
        ones_full=smem.barriers(1),
        **backward_fused_plan.walked(spec, tile),
        # What is stored takes the place of dS^T, so that keys and values are copied meanwhile.
        ds_gradients=Overlaid.of(ds, (dk, dv), rounded_dq),
        acc_dq=smem.tile((dq_parts(spec, tile), WARPGROUP_ROWS, width), jnp.float32, dim),
    )


def plan(spec: Spec, tile: ShortTiles, sums: ParameterSums, processors: int | None) -> ShortPlan:
    """Return the plan of a call on a device with `processors` multiprocessors; `None` where that is unknown."""
    items = spec.batch * spec.key_heads
    tables = TableSums.of(spec, pl.cdiv(spec.key_length, tile.keys), tile.warpgroups, processors)
    return ShortPlan(spec, sums, tables, tile, min(items, processors or items))


def suits(spec: Spec, processors: int | None) -> bool:
    """Whether there are work items for all multiprocessors, and no sums that go on after the call."""
    items = spec.batch * spec.key_heads
    at_once = processors or items
    return not spec.partial and pl.cdiv(items, at_once) * at_once <= _GAIN * items


def fits(spec: Spec, tile: ShortTiles) -> bool:
    """Whether shared memory has room for dQ beside these tiles."""
    return smem.fits(shared_memory(spec, tile))
