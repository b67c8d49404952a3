"""Logits of a tile with their derivatives, in primitives that Mosaic GPU lowers.

All backward kernels have them between S and P, and between dP and dS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu.exponent import is_plain
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
    return _lowerable(lambda s: modify_logits(inputs.spec, s, tile, _soft_cap(inputs)))(s)


def differentiate(
    s: Float[Array, "rows columns"], mask: TileMask, probabilities: Callable[[Array], Array], wanted: Sequence[str]
) -> tuple[Float[Array, "rows columns"], PullBack]:
    """A tile's probabilities from its products, 0 where the query does not see the key; and the way back.

    That takes cotangents of logits to those of the products and of the parameters `wanted`. A parameter's cotangent is
    that of its value at every element of the tile. A plain call's products have their logits' cotangent as it is: the
    scale is left to be applied to the sums.
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
    return mask.hide(probabilities(logits), 0.0), _lowerable(pull_back)


def _soft_cap(inputs: KernelInputs) -> Callable[[Array, Array | float, float], Array]:
    return lambda s, scale, cap: soft_cap(s, scale, cap, inputs.ops.warp_all_below)


def _lowerable[**Arguments, Results](function: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """`function` without what Mosaic GPU does not lower: what differentiation leaves, and custom derivatives."""

    def lowered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(jax.tree.structure(shape), _evaluate(closed.jaxpr, closed.consts, leaves))

    return lowered


def _evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        match equation.primitive.name:
            case "add_any":
                results = inputs[0] + inputs[1]
            case "reshape":
                # Of a tile to its own shape: in a mesh, what comes from device memory has a sharding, and others have
                # none, so that a cotangent is given that of its tile.
                results = inputs[0].reshape(equation.params["new_sizes"])
            case "jit" | "pjit":
                inner = equation.params["jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, inputs)
            case "custom_jvp_call":
                inner = equation.params["call_jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, inputs)
            case _:
                results = equation.primitive.bind(*inputs, **equation.params)
        many = equation.primitive.multiple_results
        values.update(zip(equation.outvars, results if many else [results], strict=True))
    return [read(atom) for atom in jaxpr.outvars]
