"""Array code without what Mosaic GPU does not lower: what differentiation leaves, custom derivatives, mixed shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jflash._semantics import program


def lowerable[**Arguments, Results](function: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """Return `function` without what Mosaic GPU does not lower."""

    def lowered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Results:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaves = program.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)), _lowerable_results)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return lowered


def _lowerable_results(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    match equation.primitive.name:
        case "add_any":
            return [inputs[0] + inputs[1]]
        case "reshape":
            # Of a tile to its own shape: in a mesh, what comes from device memory has a sharding, and others have none,
            # so that a cotangent is given that of its tile.
            return [inputs[0].reshape(equation.params["new_sizes"])]
        case "select_n" if inputs[0].ndim < equation.outvars[0].aval.ndim:
            # By what is one for all of a tile.
            return [lax.select_n(jnp.broadcast_to(inputs[0], equation.outvars[0].aval.shape), *inputs[1:])]
        case "not" if equation.outvars[0].aval.dtype == jnp.bool_:
            return [lax.bitwise_xor(inputs[0], jnp.full_like(inputs[0], True))]
        case "jit" | "pjit" | "custom_jvp_call":
            inner = equation.params["call_jaxpr" if "call_jaxpr" in equation.params else "jaxpr"]
            return program.evaluate(inner.jaxpr, inner.consts, inputs, _lowerable_results)
        case _:
            return program.apply(equation, inputs)
