"""Logits of a tile with their derivatives: what all backward kernels do between S and P, and between dP and dS."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.exponent import is_plain
from jflash._backends.mosaic_gpu.hardware.lowering import lowerable
from jflash._backends.mosaic_gpu.hardware.soft_cap import soft_cap
from jflash._backends.mosaic_gpu.inputs import KernelInputs
from jflash._backends.mosaic_gpu.schedule import TileMask
from jflash._semantics.logits import modify_logits, without_unseen

PullBack = Callable[[Array], tuple[Array, dict[str, Array]]]
"""Takes the logits' cotangents to those of the products and, by name, of the parameters."""


def logits(s: Float[Array, "rows columns"], mask: TileMask) -> Float[Array, "rows columns"]:
    """The logits of a tile of products; a plain call leaves its scale to the exponent."""
    inputs = mask.inputs
    if is_plain(inputs.spec):
        return s
    tile = inputs.tile(mask.at, s.shape, mask.loaded)
    return lowerable(lambda s: modify_logits(inputs.spec, s, tile, _soft_cap(inputs)))(s)


def differentiate(
    s: Float[Array, "rows columns"], mask: TileMask, probabilities: Callable[[Array], Array], wanted: Sequence[str]
) -> tuple[Float[Array, "rows columns"], PullBack]:
    """A tile's probabilities, 0 where the query does not see the key, and the way back from their logits.

    From the tile's products; the way leads to their cotangents and those of the parameters `wanted`.

    A parameter's cotangent is that of its value at every element of the tile. A plain call's products have their
    logits' cotangent as it is: the scale is left to be applied to the sums.
    """
    inputs = mask.inputs
    if is_plain(inputs.spec):
        return mask.hide(probabilities(s), 0.0), lambda cotangent: (cotangent, {})
    tile = inputs.tile(mask.at, s.shape, mask.loaded)

    def modify(s: Array, values: dict[str, Array]) -> Array:
        parameters = without_unseen(inputs.spec, tile.parameters._replace(**values), inputs.visible(tile))
        return modify_logits(inputs.spec, s, tile._replace(parameters=parameters), _soft_cap(inputs))

    values = {name: jnp.broadcast_to(getattr(tile.parameters, name), s.shape) for name in wanted}
    logits, pull_back = jax.vjp(modify, s, values)
    return mask.hide(probabilities(logits), 0.0), lowerable(pull_back)


def _soft_cap(inputs: KernelInputs) -> Callable[[Array, Array | float, float], Array]:
    return lambda s, scale, cap: soft_cap(s, scale, cap, inputs.ops.warp_all_below)
