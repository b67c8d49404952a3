"""A tile of the backward, computed again from the log-sum-exp: one mathematics for every backward kernel.

    P  = exp(S - lse), 0 where the query does not see the key
    dV is made of what dropout keeps of P
    dS = P (dP - delta), taken back through all that shapes logits
    what that gives parameters and tables is added to their gradients (`gradient_sums`)

A kernel says where S and dP come from, and in which order it asks. A row statistic that the products of S or dP have
subtracted already is `None` here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jflash._backends.nvidia.ops import Ref, Tile
from jflash._backends.nvidia.tile import dropped, logits, program_reads, softmax
from jflash._backends.nvidia.tile.logits import PullBack
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics import score_mod_reads


class TileGradients(NamedTuple):
    """What a tile gives the products and, by name, the parameters and reads that were asked for."""

    ds: Tile
    parameters: Mapping[str, Tile]


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """P of a tile, and the way from dP back to dS."""

    context: TileContext
    p: Tile
    """P, of which dropout changes the sign of what it drops."""
    pull_back: PullBack

    @classmethod
    def of(cls, context: TileContext, s: Tile, lse: Tile | None, differentiated: Sequence[str]) -> BackwardTile:
        """Return the tile of products S; `differentiated` names the parameters and reads whose gradients it gives."""
        exponent = softmax.exponent(context.inputs.spec)
        p, pull_back = logits.differentiate(s, context, lambda logits: exponent(logits, lse), differentiated)
        return cls(context, dropped.signed(context.inputs, context.at, p), pull_back)

    @property
    def kept(self) -> Tile:
        """What dropout keeps of P, to be multiplied with dO."""
        return dropped.kept(self.context.inputs.spec, self.p)

    def differentiate(self, dp: Tile, delta: Tile | None) -> TileGradients:
        """Return dS, and the gradients of the parameters at each element, from dP = dO V^T."""
        return TileGradients(*self.pull_back(dropped.d_logits(self.context.inputs.spec, self.p, dp, delta)))

    def add_to_tables(self, sums: Mapping[str, Ref], gradients: TileGradients, opaque_zero: Any = None) -> None:
        """Add the gradients of what the tile reads by position to a warpgroup's sums by the arrays' names, if any.

        With an opaque zero the compiler makes the indices anew. Otherwise it keeps those of the reads in registers, or
        spills them. Where a probability is 0, what is read there counts for nothing.
        """
        if not sums:
            return
        inputs, at, score_mod = self.context.inputs, self.context.at, self.context.inputs.spec.score_mod
        assert score_mod is not None
        if opaque_zero is not None:
            at = at._replace(key=at.key + opaque_zero)
        tile = inputs.tile(at, self.p.shape, self.context.loaded)
        for read in score_mod_reads.of_tables(inputs.spec):
            numbers = jnp.where(self.p == 0, 0.0, gradients.parameters[read.name])
            table = sums[score_mod_reads.array_name(read.array)]
            inputs.ops.add_by_index(table, program_reads.index(score_mod, read, tile), numbers)
