"""`score_mod`: a user's function of one logit, traced once, with the arrays it closes over taken out."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params
from jaxtyping import Array, Int

from jflash._semantics.wide_arrays import is_narrower, widened

ScoreModFunction = Callable[[Array, Array, Array, Array, Array], Array]
"""A function `f(logit, batch, head, query_index, key_index) -> logit` on scalars."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreMod:
    """A traced `score_mod` without its closed-over arrays.

    Two of them are equal when the same function object traced to the same program: that lets `jax.jit` find its
    compiled code again. The program is compared as text, so a function whose captured Python values have changed is not
    taken for its former self.
    """

    function: weakref.ref[Any]
    """A weak reference to the function: compiled code outlives the call, and what a function closes over should not."""
    program: str
    jaxpr: Any

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, ScoreMod):
            return self is other
        function = self.function()
        return function is not None and function is other.function() and self.program == other.program

    def __hash__(self) -> int:
        return hash(self.program)

    def __call__(
        self,
        logits: Array,
        batch: Int[Array, "..."],
        head: Int[Array, "..."],
        query: Int[Array, "..."],
        key: Int[Array, "..."],
        arrays: tuple[Array, ...],
    ) -> Array:
        """Apply to a tile of logits whose first axis is the batch.

        The indices are scalars, or have the logits' rank and broadcast to their shape; `arrays` have a leading axis
        of size 1 or of the tile's batch.
        """

        def scalar(logit: Array, batch: Array, head: Array, query: Array, key: Array, arrays: tuple[Array, ...]):
            (result,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, arrays))(logit, batch, head, query, key)
            return jnp.asarray(result, logit.dtype)

        return elementwise(scalar, logits, (batch, head, query, key), arrays)


def elementwise(
    function: Callable[..., Array], logits: Array, others: Sequence[Array], arrays: tuple[Array, ...]
) -> Array:
    """Return `function(logit, *others, arrays)` of scalars for every element of a tile.

    The shapes are those of `ScoreMod.__call__`, where the `others` are its indices.
    """
    operands = list(others)
    for axis in reversed(range(logits.ndim)):
        mapped = [operand.ndim > 0 and operand.shape[axis] != 1 for operand in operands]
        operands = [x if m or x.ndim == 0 else x.squeeze(axis) for x, m in zip(operands, mapped, strict=True)]
        array_axes = tuple(0 if axis == 0 and array.shape[0] != 1 else None for array in arrays)
        function = jax.vmap(function, in_axes=(0, *(0 if m else None for m in mapped), array_axes))
    arrays = tuple(array if array.shape[0] != 1 else array.squeeze(0) for array in arrays)
    return function(logits, *operands, arrays)


def trace_score_mod(function: ScoreModFunction, dtype: np.dtype[Any]) -> tuple[ScoreMod, tuple[Array, ...]]:
    """Trace `function` at a logit of `dtype`; return it and the arrays it closes over, in the jaxpr's order.

    Floating-point arrays of fewer bits than `dtype` come in `dtype` (`wide_arrays`).

    Raises:
      TypeError: if `function` is not callable, or its result is not one floating-point array.
      ValueError: if its result is not a scalar.
    """
    if not callable(function):
        raise TypeError(f"`score_mod` must be a function. Got {type(function).__name__}.")
    try:
        inspect.signature(function).bind(*[None] * 5)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`score_mod` is called as f(logit, batch, head, query_index, key_index). Got {function!r}: {error}."
        ) from None
    try:
        closed, shape = _traced(function, dtype)
        if dtype.itemsize <= 4 and _may_have_32_bits(closed):
            with jax.enable_x64(False):
                closed, shape = _traced(function, dtype)
    except Exception as error:
        error.add_note(f"This happened while `score_mod` was traced: {function!r}.")
        if isinstance(error, jax.errors.ConcretizationTypeError):
            error.add_note("Its arguments are not known then: write jnp.where in the place of `if`.")
        raise
    if not isinstance(shape, jax.ShapeDtypeStruct) or not jnp.issubdtype(shape.dtype, jnp.floating):
        raise TypeError(
            "`score_mod` must return one floating-point logit. "
            f"Got {jax.tree.map(lambda leaf: f'{leaf.dtype}{list(leaf.shape)}', shape)}."
        )
    if shape.shape != ():
        raise ValueError(
            "`score_mod` is called on one logit and must return one: the shape must stay (). "
            f"Got a result of shape {shape.shape}."
        )
    arrays = tuple(jnp.asarray(constant) for constant in closed.consts)
    if any(is_narrower(array.dtype, dtype) for array in arrays):
        closed, _ = _traced(widened(closed, dtype), dtype)
        arrays = tuple(closed.consts)
    # A jaxpr holds on to the constants it was made with: their shapes take their place.
    shapes: Any = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    jaxpr = ClosedJaxpr(closed.jaxpr, shapes)
    return ScoreMod(_reference(function), str(closed.jaxpr), jaxpr), arrays


def _traced(function: ScoreModFunction, dtype: np.dtype[Any]) -> tuple[ClosedJaxpr, Any]:
    """Return the program of `function`, and the shape of what it returns."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    # A new function each time: JAX keeps what it traced, with the arrays closed over, as long as the function.
    once = jax.make_jaxpr(lambda *scalars: function(*scalars), return_shape=True)
    # A jaxpr remembers the mesh that it was traced under, and this one is run under others.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return once(jax.ShapeDtypeStruct((), dtype), *[index] * 4)


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

    Then they get as many bits as the logit: `0.5 * (query - key)` is float32 beside a float32 logit, as without the
    setting.
    """

    def of_python(value: Any) -> bool:
        aval, number = value.aval, value.val if isinstance(value, Literal) else 0
        largest = 2**31 - 1 if jnp.issubdtype(aval.dtype, jnp.integer) else float(np.finfo(np.float32).max)
        return aval.weak_type and not largest < abs(number) < np.inf

    wide = list(values_of_64_bits(closed.jaxpr))
    return len(wide) > 0 and all(map(of_python, wide))


def _reference(function: Any) -> weakref.ref[Any]:
    """Return a weak reference to the function, or for a bound method, a new object at each lookup, to what it is bound
    to."""
    lasting = getattr(function, "__self__", function)
    if type(lasting).__weakrefoffset__ == 0:
        raise TypeError(
            "`score_mod` must be a function, or an object that weak references can follow. "
            f"Got {type(lasting).__name__}, which has __slots__ without __weakref__."
        )
    return weakref.ref(lasting)
