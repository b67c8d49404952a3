"""Forward of up to 16 rows, as when decoding: warps share the keys of each tile.

    each warp, with all rows and a quarter of the tile's keys:
      S, P, m, l, O as in `forward_kernel`, over its own keys
    m = largest m of all warps;  l, O = sums of theirs, relative to m

In `forward_kernel` each of four warps computes 16 of 64 rows. With 16 rows or fewer, three of them would compute
padding alone. Keys and values of 8 bits stay as they are in shared memory, and are converted in registers
(`byte_operand`). A number that scales them is applied to S and to O, and a number for each page to S and to P.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu_mma.cta import MmaOps, buffer, columns, page_numbers
from jflash._backends.mosaic_gpu_mma.forward_kernel import ForwardCta, ForwardPlan, State, Statistics
from jflash._backends.mosaic_gpu_mma.products import Operand, Tiles
from jflash._backends.mosaic_gpu_mma.warp_sums import NUMBERS
from jflash._backends.nvidia import cache_rows, smem
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.packing import packs
from jflash._backends.nvidia.smem import WARP_ROWS, WARPGROUP_ROWS, Buffers
from jflash._backends.nvidia.threads.builder import LANES, WARPS
from jflash._backends.nvidia.tile import softmax
from jflash._backends.nvidia.tile.softmax import Softmax, scaled_rows
from jflash._semantics.online_softmax import finite_or_zero
from jflash._semantics.spec import Spec


def serves(spec: Spec) -> bool:
    """Return whether a call of 16 bits has few rows, and logits and masks that are made of products and indices."""
    facts, rows = facts_of(spec), spec.query_length * (spec.group if packs(spec) else 1)
    of_indices = {"mask", "query_segments", "key_segments"}.isdisjoint(spec.operands) and spec.mask_mod is None
    is_simple = facts.follows_products and of_indices and spec.dropout_rate == 0
    return rows <= WARP_ROWS and is_simple and not facts.is_float32


def stays_in_bytes(spec: Spec) -> bool:
    """Return whether tiles of a call's cache are of 8 bits in shared memory."""
    pages, dims = spec.pages, (spec.head_dim, spec.value_dim)
    if pages is None or pages.dtype.itemsize > 1 or any(dim % 32 for dim in dims):
        return False
    # P times the scale of a page may be too small for float16.
    return not pages.scaled_by_page or spec.dtype == jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class FewRowsPlan(ForwardPlan):
    """A forward of few rows, known before any array."""

    @property
    def smem(self) -> Buffers:
        spec, tile = self.spec, self.tile
        dtype = spec.pages.dtype if spec.pages is not None and stays_in_bytes(spec) else spec.dtype
        ring = lambda dim: plgpu.SMEM((tile.stages, tile.size, columns(dim)), dtype)
        return Buffers(
            query=buffer(spec, WARP_ROWS, columns(spec.head_dim)),
            key=ring(spec.head_dim),
            value=ring(spec.value_dim),
            page_numbers=page_numbers(spec, tile),
            bias=None,
            vectors=smem.vectors(2 * WARPGROUP_ROWS),
            scratch=smem.vectors(WARPS, NUMBERS, LANES),
        )


class FewRowsCta(ForwardCta):
    """A CTA of the forward of few rows."""

    def __init__(self, plan: ForwardPlan, refs: Refs, ops: MmaOps) -> None:
        super().__init__(plan, refs, ops, warps_share_keys=True)
        self.keys, self.chosen = plan.tile.size // WARPS, dict(by_warp=True)
        self.of_bytes = stays_in_bytes(plan.spec)
        given = {
            name: refs.arrays[ref] for name, ref in cache_rows.SCALES.items() if self.of_bytes and ref in refs.arrays
        }
        self.page_scales = {name: self._of_head(ref) for name, ref in given.items() if ref.shape[1] > 1}
        """References to what keys, and values, of 8 bits are multiplied by, for each page."""
        self.scales = {name: self._of_head(ref)[0] for name, ref in given.items() if ref.shape[1] == 1}
        """What all keys, and values, of 8 bits are multiplied by."""
        self.tile_scales = dict[str, Array]()
        """What the keys, and values, of the visited tile are multiplied by, for each element of its logits."""

    def _of_head(self, scales: Ref) -> Ref:
        """Return what this CTA's key head has of scales `[#B, #pages, #K]`."""
        entry, head = (0 if scales.shape[axis] == 1 else at for axis, at in ((0, self.batch), (2, self.key_head)))
        return scales.at[entry, :, head]

    def _scaled(self, name: str, sums: Tiles) -> Tiles:
        scale = self.scales.get(name)
        return sums if scale is None else tuple(each * scale for each in sums)

    def visit(self, index: Any, q: Sequence[tuple[Operand, dict[str, Any]]], before: State) -> State:
        # Before the wait for the tile: its pages' numbers came before those of the next.
        pages, first, shape = self.plan.spec.pages, self.tiles.start(index), (WARPGROUP_ROWS, self.keys)
        for name, scales in self.page_scales.items():
            assert pages is not None
            numbers = self.page_numbers(index)
            tile = self.ops.load_page_scales(scales, numbers, pages.size, first, self.key_limit, shape)
            self.tile_scales[name] = tile
        return super().visit(index, q, before)

    def held_queries(self, rows: Sequence[Any]) -> list[tuple[Operand, dict[str, Any]]]:
        self.ops.wait()
        return [(self.ops.load_rows(q, beside_bytes=self.of_bytes), {}) for q in rows]

    def products(self, index: Any, q: Sequence[tuple[Operand, dict[str, Any]]]) -> Tiles:
        (s,) = self._scaled("key", super().products(index, q))
        return (s * self.tile_scales["key"] if "key" in self.page_scales else s,)

    def add_values(self, index: Any, states: Sequence[Softmax], acc_o: Tiles) -> Tiles:
        # In most tiles no row has its largest logit so far.
        (state,), (acc,) = states, acc_o
        is_same = self.ops.warp_all(state.rescale == 1)
        acc = lax.cond(is_same, lambda acc, _: acc, scaled_rows, acc, state.rescale)
        p = state.p
        if "value" in self.page_scales:
            p = (p.astype(jnp.float32) * self.tile_scales["value"]).astype(p.dtype)
        return self.add_product((acc,), ((p,),), self.smem.value.at[self.slot(index)], **self.chosen)

    def finish(self, statistics: Sequence[Statistics], acc_o: Tiles) -> None:
        ((m, l),), exponent = statistics, self.form.exponent(self.plan.spec)
        largest = self._over_warps(jnp.maximum, m)
        shrink = exponent.rescaling(m, finite_or_zero(largest))
        total = self._over_warps(jnp.add, softmax.whole(l) * shrink)
        sums = (
            self.ops.sum_of_warps(scaled_rows(acc, shrink), self.smem.scratch, made_of_bytes=self.of_bytes)
            for acc in acc_o
        )
        super().finish([(largest, total)], self._scaled("value", tuple(sums)))

    def _over_warps(self, operation: Any, vector: Array) -> Array:
        """Return each row's number of all warps, combined."""
        shared = self.smem.vectors
        self.ops.meet()
        for copy in range(2):
            shared[pl.ds(copy * WARPGROUP_ROWS, WARPGROUP_ROWS)] = vector
        self.ops.meet()
        return functools.reduce(
            operation, (self.ops.load(shared.at[pl.ds(warp * WARP_ROWS, WARPGROUP_ROWS)], 0) for warp in range(WARPS))
        )
