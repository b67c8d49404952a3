"""A `score_mod` with the arrays that it closes over in the logit's dtype, where that has more bits.

JAX gives a cotangent the dtype of its array, and adds up in it. So when all logits send something back to one number of
a table in bfloat16, the sum no longer grows after some 256 terms. In the wide dtype the numbers are the same, and are
moved and selected in the same way. What the function computes in the narrow dtype is still computed in it, number by
number for each logit. So every sum of what logits send back is made in the wide dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array

from jflash._semantics import program

_MOVING = frozenset({
    "broadcast_in_dim", "concatenate", "convert_element_type", "dynamic_slice", "gather", "pad", "reshape", "rev",
    "select_n", "slice", "squeeze", "transpose",
})  # fmt: skip
"""Names of operations that copy numbers of their inputs and compute none."""


def is_narrower(dtype: Any, than: Any) -> bool:
    """Return whether a dtype is floating-point and has fewer bits than another."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(than).bits


def widened(closed: ClosedJaxpr, wide: np.dtype[Any]) -> Callable[..., Array]:
    """Return the function of a traced `score_mod`, with its arrays in the dtype `wide`."""
    widen = lambda variable, value: jnp.asarray(value, wide) if is_narrower(variable.aval.dtype, wide) else value
    arrays = list(map(widen, closed.jaxpr.constvars, closed.consts))

    def function(*scalars: Array) -> Array:
        def rule(equation: Any, inputs: list[Any]) -> Sequence[Any]:
            inputs, params = list(map(widen, equation.invars, inputs)), equation.params
            match equation.primitive.name:
                case "jit" | "pjit":
                    results = program.evaluate(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs, rule)
                case "cond":
                    results = lax.switch(inputs[0], list(map(branch, params["branches"])), *inputs[1:])
                case name if name in _MOVING:
                    results = program.apply(equation, inputs)
                    if params.get("fill_value") is not None:
                        results = [
                            x.astype(variable.aval.dtype) for x, variable in zip(results, equation.outvars, strict=True)
                        ]
                case _:
                    results = program.apply(equation, list(map(narrowed, equation.invars, inputs)))
            return list(map(widen, equation.outvars, results))

        def branch(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
            evaluate = functools.partial(program.evaluate, closed.jaxpr, closed.consts, rule=rule)
            return lambda *operands: list(map(widen, closed.jaxpr.outvars, evaluate(operands)))

        def narrowed(variable: Any, value: Any) -> Any:
            dtype = variable.aval.dtype
            if not is_narrower(dtype, wide):
                return value
            if value.ndim == 0 and not isinstance(variable, Literal):
                # A number that depends on all indices belongs to one logit. Subtracting a zero leaves -0.0 as it is.
                value = value - (functools.reduce(jnp.bitwise_or, scalars[1:]) & 0).astype(wide)
            return value.astype(dtype)

        return program.evaluate(closed.jaxpr, arrays, scalars, rule)[0]

    return function
