"""Forward of wide heads whose values are the keys, as in a latent cache: both products read one copy of a tile.

    the first warpgroup                                     the second and the third, each with some columns of O
      S = Q K_j^T
      P, m, l = online softmax of S    --- P, rescale --->    O = O * rescale + P K_j, in their columns
      O = O * rescale + P K_j, in columns past 512
      after the last tile                 --- m, l --->       out = O / l;  lse = log l + m

Few queries see many keys here, so the kernel is as fast as its copies are, and there is one for two. A chunk of a tile
leaves when all three warpgroups have read it.

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), "A Deep Dive Into The New Flash MLA Kernel".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.mosaic_gpu import piece_products
from jflash._backends.mosaic_gpu.column_chunks import ChunkRing
from jflash._backends.mosaic_gpu.forward_wide import Sums, WideForwardCta
from jflash._backends.mosaic_gpu.forward_wide_plan import WEIGHTS, LatentForwardPlan
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.tile.softmax import Softmax


class LatentForwardCta(WideForwardCta):
    """A CTA of the forward of a latent cache."""

    plan: LatentForwardPlan  # pyright: ignore[reportIncompatibleVariableOverride]
    # What lies past the last key is cleared where values are copied.
    copied = "value"

    def __init__(self, plan: LatentForwardPlan, refs: Refs, ops: WarpgroupOps) -> None:
        super().__init__(plan, refs, ops)
        assert plan.tile.chunk_slots >= plan.key_chunks.number, "a chunk leaves after all of its tile have come"
        again = plan.key_chunks.number - 1 if plan.sums[WEIGHTS] else None
        self.keys = ChunkRing(plan.key_chunks, refs.smem.keys, again=again)

    def weighed(self, half: int) -> Sequence[Ref]:
        return [self.smem.keys.empty]

    def add_values(self, half: int, step: Any, opaque_zero: Any, sums: list[Array]) -> Sums:
        (p,) = map(self.ops.load, piece_products.of_tile(self.plan.spec, self.smem.handed.p))
        plgpu.barrier_arrive(self.smem.handed.empty)
        for chunk in range(self.plan.key_chunks.number):
            slot = self.keys.slot(step, chunk)
            plgpu.barrier_wait(self.smem.keys.full.at[slot])
            self._add_chunk(half, chunk, slot + opaque_zero, (p,), sums)
            plgpu.barrier_arrive(self.smem.keys.empty.at[slot])
        return tuple(sums)

    def add_own(self, step: Any, state: Softmax, p: Pieces, sums: Sums) -> Sums:
        chunk = self.keys.again
        if chunk is None:
            return sums
        slot, own = self.keys.slot(step, chunk), [self.form.rescaled(self.inputs, state.rescale, *sums)]
        self._add_chunk(WEIGHTS, chunk, slot, p, own)
        plgpu.barrier_arrive(self.smem.keys.empty.at[slot])
        return tuple(own)

    def _add_chunk(self, number: int, chunk: int, slot: Any, p: Pieces, sums: list[Array]) -> None:
        """Add P times a chunk to those of a warpgroup's sums that are of its columns."""
        chunk_width, spec = self.plan.key_chunks.width, self.plan.spec
        for turn, (first, width) in enumerate(self.plan.sums[number]):
            if first // chunk_width == chunk:
                columns = pl.ds(first % chunk_width, width)
                v = self.smem.keys.tiles.at[slot, :, columns]
                sums[turn] = piece_products.add_matmul(spec, sums[turn], p, (v,), self.ops)
