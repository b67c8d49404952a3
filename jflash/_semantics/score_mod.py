"""`score_mod`: a user's function of one logit, traced once, with the arrays it closes over taken out."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Int

from jflash._semantics import tracing
from jflash._semantics.tracing import equations, values_of_64_bits
from jflash._semantics.wide_arrays import is_narrower, widened

ScoreModFunction = Callable[[Array, Array, Array, Array, Array], Array]
"""A function `f(logit, batch, head, query_index, key_index) -> logit` on scalars."""
_ARGUMENTS = "logit", "batch", "head", "query_index", "key_index"

__all__ = ["ScoreMod", "ScoreModFunction", "elementwise", "equations", "trace_score_mod", "values_of_64_bits"]


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
    dtypes = [dtype, *[jnp.int32] * 4]
    closed, shape = tracing.trace("score_mod", function, _ARGUMENTS, dtypes, narrow=dtype.itemsize <= 4)
    if not isinstance(shape, jax.ShapeDtypeStruct) or not jnp.issubdtype(shape.dtype, jnp.floating):
        raise TypeError(f"`score_mod` must return one floating-point logit. Got {tracing.described(shape)}.")
    if shape.shape != ():
        raise ValueError(
            "`score_mod` is called on one logit and must return one: the shape must stay (). "
            f"Got a result of shape {shape.shape}."
        )
    arrays = tuple(jnp.asarray(constant) for constant in closed.consts)
    if any(is_narrower(array.dtype, dtype) for array in arrays):
        closed, _ = tracing.traced(widened(closed, dtype), dtypes)
        arrays = tuple(closed.consts)
    return ScoreMod(_reference(function), str(closed.jaxpr), tracing.without_constants(closed)), arrays


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
