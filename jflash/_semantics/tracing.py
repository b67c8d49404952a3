"""Traces a user's function of scalars to its program: what `score_mod` and `mask_mod` have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params


def trace(name: str, function: Callable[..., Any], arguments: Sequence[str], dtypes: Sequence[Any], *, narrow: bool):
    """Return the program of `function`, called with a scalar of each dtype, and the shapes of what it returns.

    With `narrow`, a program that has 64 bits only because Python's numbers have them gets 32.

    Raises:
      TypeError: if it is not callable, or not with that number of arguments; the message calls it `name`.
    """
    if not callable(function):
        raise TypeError(f"`{name}` must be a function. Got {type(function).__name__}.")
    try:
        inspect.signature(function).bind(*[None] * len(arguments))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` is called as f({', '.join(arguments)}). Got {function!r}: {error}.") from None
    try:
        closed, shape = traced(function, dtypes)
        if narrow and _may_have_32_bits(closed):
            with jax.enable_x64(False):
                closed, shape = traced(function, dtypes)
    except Exception as error:
        error.add_note(f"This happened while `{name}` was traced: {function!r}.")
        if isinstance(error, jax.errors.ConcretizationTypeError):
            error.add_note("Its arguments are not known then: write jnp.where in the place of `if`.")
        raise
    return closed, shape


def traced(function: Callable[..., Any], dtypes: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """Return the program of `function` of scalars, and the shapes of what it returns."""
    # A new function each time: JAX keeps what it traced, with the arrays closed over, as long as the function.
    once = jax.make_jaxpr(lambda *scalars: function(*scalars), return_shape=True)
    # A jaxpr remembers the mesh that it was traced under, and this one is run under others.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return once(*[jax.ShapeDtypeStruct((), dtype) for dtype in dtypes])


def without_constants(closed: ClosedJaxpr) -> Any:
    """Return the program alone: a jaxpr holds on to its constants, so their shapes take their place."""
    shapes: Any = [jax.ShapeDtypeStruct(jnp.shape(array), array.dtype) for array in closed.consts]
    return ClosedJaxpr(closed.jaxpr, shapes)


def described(shape: Any) -> str:
    """Return what a function returned, in words for the user."""
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", shape))


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a program, and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def values_of_64_bits(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the 64-bit values, variables and literals, of a program and of the programs inside it."""
    for equation in equations(jaxpr):
        values: list[Any] = [*equation.invars, *equation.outvars]
        yield from (value for value in values if value.aval.dtype.itemsize > 4)


def _may_have_32_bits(closed: ClosedJaxpr) -> bool:
    """Return whether a program has 64 bits only because Python's numbers do, with `jax_enable_x64`.

    Then they get as many bits as what they meet: `0.5 * (query - key)` is float32 beside a float32 logit, as without
    the setting.
    """

    def of_python(value: Any) -> bool:
        aval, number = value.aval, value.val if isinstance(value, Literal) else 0
        largest = 2**31 - 1 if jnp.issubdtype(aval.dtype, jnp.integer) else float(np.finfo(np.float32).max)
        return aval.weak_type and not largest < abs(number) < np.inf

    wide = list(values_of_64_bits(closed.jaxpr))
    return len(wide) > 0 and all(map(of_python, wide))
