"""What the queries of one tile do not see, for the forward's logits and the backward's probabilities alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jflash._backends.mosaic_gpu.inputs.kernel_inputs import KernelInputs, Loaded, TileCoord
from jflash._backends.mosaic_gpu.schedule.tile_range import TileRange


@dataclasses.dataclass(frozen=True)
class TileMask:
    """The mask of the tile at `at`, the `index`-th of its range."""

    inputs: KernelInputs
    tiles: TileRange
    index: Any
    at: TileCoord
    loaded: Loaded

    @property
    def is_partial(self) -> Bool[Array, ""] | None:
        """Whether more than a dense mask hides some of the tile; `None` if nothing ever does."""
        return self.tiles.is_partial(self.index)

    def hide(self, values: Array, hidden: float) -> Array:
        """`values` where the query sees the key, `hidden` elsewhere."""
        values, is_partial = self.hide_by_dense_mask(values, hidden), self.is_partial
        if is_partial is None:
            return values
        return lax.cond(
            is_partial, lambda values: self._hide_by_position(values, hidden), lambda values: values, values
        )

    def hide_by_dense_mask(self, values: Array, hidden: float) -> Array:
        """`values` where the call's dense mask, if it has one, lets the query see the key, `hidden` elsewhere."""
        mask = self.inputs.tile(self.at, values.shape, self.loaded).mask
        return values if mask is None else jnp.where(jnp.broadcast_to(mask, values.shape), values, hidden)

    def _hide_by_position(self, values: Array, hidden: float) -> Array:
        """`hidden` where bounds, lengths or segments hide the key."""
        tile = self.inputs.tile(self.at, values.shape, self.loaded)._replace(mask=None)
        return jnp.where(self.inputs.visible(tile), values, hidden)
