"""Backward in one kernel whose consumers hold one sum each: `backward_dkv`, which makes dQ too.

    the second consumer leaves dS^T in the place of P^T, and each of the two makes half the columns of
      dQ = dS K
    which it adds to accumulators in device memory, from registers

These are five products where two kernels make seven: for pieces of float32, whose products are dear and whose sums of
128 columns are too many for the registers and shared memory of `backward`. dQ stays in float32, so nothing rounds it.
Additions come in any order.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import piece_products, smem
from jflash._backends.mosaic_gpu.array_shapes import tile_dims
from jflash._backends.mosaic_gpu.backward_dkv import QUERIES, DkvCta, DkvPlan
from jflash._backends.mosaic_gpu.run import HopperBackward
from jflash._backends.mosaic_gpu.smem import CallTiles
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads import sums
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.inputs import TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._semantics.spec import Spec

_WARPGROUPS = 2
"""Warpgroups that compute."""


def suits(spec: Spec) -> bool:
    """Whether products are dear, as those of float32's pieces are, and halves of dQ's columns are whole swizzles."""
    return facts_of(spec).is_float32 and tile_dims(spec)[0] == 128


@dataclasses.dataclass(frozen=True)
class DkvDqPlan(DkvPlan):
    """The kernel, before any array."""

    name: ClassVar = "d_query_key_value"

    @property
    def smem(self) -> Buffers:
        """The buffers of `backward_dkv`, with dS^T in the place of P^T."""
        shared = super().smem
        handed, ds = shared.p, CallTiles.of(self.spec).operand((WARPGROUP_ROWS, QUERIES))
        p = Buffers(slopes=handed.slopes, full=handed.full, empty=smem.barriers(1, arrivals=_WARPGROUPS))
        return Buffers(**vars(shared) | dict(p=p, p_ds=smem.reused(handed.tile, ds), ds_full=smem.barriers(1)))

    def arrays(self, call: HopperBackward) -> dict[str, Array]:
        return call.around(keys_first=True) | call.tiles | call.rows | call.visits(self.visits)

    def states(self, call: HopperBackward) -> dict[str, Array]:
        return dict(dq_acc=jnp.zeros(self.dq_acc, jnp.float32))

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        halves = sums.as_rows(changed["dq_acc"]).transpose(0, 3, 1, 2, 4)
        d_query = halves.reshape(*halves.shape[:3], -1) * facts_of(self.spec).sums_scale
        return super().finish(made, changed) | dict(d_query=d_query)

    @property
    def dq_width(self) -> int:
        """Columns of a tile's dQ that a warpgroup makes."""
        return tile_dims(self.spec)[0] // _WARPGROUPS

    @property
    def dq_acc(self) -> tuple[int, ...]:
        """The shape of dQ's accumulators, with room for a tile that begins at the last query."""
        rows = round_up(self.spec.query_length, sums.ROWS) + QUERIES
        return self.spec.batch, self.spec.heads, _WARPGROUPS, rows, self.dq_width


class DkvDqCta(DkvCta[DkvDqPlan]):
    """A CTA that has a block of keys, and adds to dQ."""

    @property
    def p(self) -> Ref:
        """P^T of a tile, until dS^T takes its place."""
        return self.smem.p_ds[0]

    def make_dv(self) -> None:
        """Make P, dV and half of dQ. P's place is empty when both warpgroups have made their halves."""
        plgpu.barrier_arrive(self.smem.p.empty)
        super().make_dv()

    def hand_over(self, ds: Float[Array, "keys queries"], q_full: Any) -> Pieces:
        """Store dS^T in the place of P, for both warpgroups' dQ, and return it as an operand, for dK."""
        spec = self.plan.spec
        pieces = operand_pieces.split(spec, ds, self.ops)
        # All threads have read P.
        plgpu.commit_smem()
        for piece, target in zip(pieces, piece_products.of_tile(spec, self.smem.p_ds[1]), strict=True):
            target[...] = piece
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem.ds_full)
        plgpu.barrier_wait(q_full)
        return pieces

    def add_matmul(
        self, acc: Array, a: Pieces, b: Pieces, free: Callable[[], None], at: TileCoord, opaque_index: Array
    ) -> Float[Array, "keys columns"]:
        """Return acc + a @ b, and add this warpgroup's columns of the tile's dQ to device memory.

        Both products run at once, unless they begin at zero in accumulators of their own, for which there is no room.
        """
        spec, ops, shape = self.plan.spec, self.ops, (QUERIES, self.plan.dq_width)
        if facts_of(spec).pieces < 3:

            def add(ref: Any) -> Array:
                piece_products.mma(ref, a, b, ops)
                return ops.accumulators(lambda acc_dq: self._make_dq(acc_dq, opaque_index, free), shape)

            dq, (acc,) = piece_products.accumulate(spec, add, acc, like=ops.full(shape, 0), ops=ops)
        else:
            acc = super().add_matmul(acc, a, b, free, at, opaque_index)
            dq = ops.accumulators(lambda acc_dq: self._make_dq(acc_dq, opaque_index, lambda: None), shape)
        plgpu.barrier_arrive(self.smem.p.empty)
        acc_dq = self.refs.arrays["dq_acc"].at[at.batch, at.head, self.warpgroup]
        ops.add_to_sums(acc_dq.at[pl.ds(at.query, QUERIES)], dq)
        return acc

    def _make_dq(self, acc_dq: Any, opaque_index: Array, free: Callable[[], None]) -> Float[Array, "queries columns"]:
        """Return dS K, for this warpgroup's columns of K, and call `free` when earlier products are made."""
        plgpu.barrier_wait(self.smem.ds_full)
        spec, width = self.plan.spec, self.plan.dq_width
        k = self.k.at[pl.ds(opaque_index * WARPGROUP_ROWS, WARPGROUP_ROWS)]
        k = piece_products.of_tile(spec, k, self.warpgroup * width, width)
        ds = operand_pieces.transposed(piece_products.of_tile(spec, self.smem.p_ds[1]))
        piece_products.mma(acc_dq, ds, k, self.ops)
        self.ops.wait(piece_products.issued(k))
        free()
        return self.ops.read(acc_dq)
