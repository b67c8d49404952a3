"""`mask_mod`: a user's function of indices that says who sees whom, traced once, without the arrays it closes over."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Bool, Int, Int8

from jflash._semantics import tracing

MaskModFunction = Callable[[Array, Array, Array, Array], Array]
"""A function `f(batch, head, query_index, key_index) -> bool` on scalars."""
_ARGUMENTS = "batch", "head", "query_index", "key_index"


@dataclasses.dataclass(frozen=True, eq=False)
class MaskMod:
    """A traced `mask_mod` without its closed-over arrays.

    Two are equal when they are the same program, whichever functions they were traced from. The text of a program does
    not show the arrays that a `jax.jit` inside of it closes over: those have to be the same objects.
    """

    program: str
    inner_arrays: tuple[int, ...]
    """The identities of the arrays that inner programs close over, which `jaxpr` keeps alive."""
    jaxpr: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskMod):
            return NotImplemented
        return (self.program, self.inner_arrays) == (other.program, other.inner_arrays)

    def __hash__(self) -> int:
        return hash(self.program)

    def __call__(
        self,
        batch: Int[Array, "..."],
        head: Int[Array, "..."],
        query: Int[Array, "..."],
        key: Int[Array, "..."],
        arrays: tuple[Array, ...],
    ) -> Bool[Array, "..."]:
        """Return who sees whom in a tile whose first axis is the batch.

        The indices have one rank and broadcast to the tile's shape; so does the result, which has size 1 along axes
        that all of them have no part in. `arrays` are `[#b, *own shape]`.
        """
        function: Callable[..., Array] = lambda arrays, *indices: self.scalar(*indices, arrays=arrays)
        indices = [batch, head, query, key]
        for axis in reversed(range(batch.ndim)):
            mapped = [index.shape[axis] > 1 for index in indices]
            of_arrays = tuple(0 if axis == 0 and array.shape[0] > 1 else None for array in arrays)
            in_axes: Any = (of_arrays, *(0 if m else None for m in mapped))
            has_part = any(mapped) or 0 in of_arrays
            function = jax.vmap(function, in_axes) if has_part else functools.partial(_with_axis, function)
            indices = [index if m else index.squeeze(axis) for index, m in zip(indices, mapped, strict=True)]
        given = tuple(array if array.shape[0] > 1 else array.squeeze(0) for array in arrays)
        return function(given, *indices)

    @functools.cached_property
    def looks_at(self) -> tuple[bool, ...]:
        """Whether batch, head, query and key have a part in its result."""
        jaxpr = self.jaxpr.jaxpr
        needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
        for equation in reversed(jaxpr.eqns):
            if not needed.isdisjoint(equation.outvars):
                needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
        return tuple(variable in needed for variable in jaxpr.invars)

    def scalar(self, batch: Array, head: Array, query: Array, key: Array, arrays: tuple[Array, ...]) -> Bool[Array, ""]:
        """Return whether one query sees one key."""
        return jnp.asarray(jaxpr_as_fun(ClosedJaxpr(self.jaxpr.jaxpr, arrays))(batch, head, query, key)[0], bool)


def _with_axis(function: Callable[..., Array], *args: Any) -> Array:
    return function(*args)[None]


class TracedMaskMod(NamedTuple):
    """The argument `mask_mod` of `attention`, traced."""

    mask_mod: MaskMod
    arrays: tuple[Array, ...]
    """The arrays that the function closes over."""
    coverage: Int8[Array, "#B #N I J"] | None = None
    """How much of each tile it shows, as `Coverage.encoded`, where the caller had that made before."""
    shape: tuple[int, int, int, int] | None = None
    """The batch entries, heads, queries and keys for which the caller had it made."""


def trace_mask_mod(function: MaskModFunction) -> TracedMaskMod:
    """Trace `function`, and take the arrays out that it closes over; they have no gradient.

    Raises:
      TypeError: if it is not callable, has side effects, or its result is not one bool.
      ValueError: if its result is not a scalar.
    """
    closed, shape = tracing.trace("mask_mod", function, _ARGUMENTS, [jnp.int32] * 4, narrow=True)
    if not isinstance(shape, jax.ShapeDtypeStruct) or shape.dtype != bool:
        raise TypeError(
            "`mask_mod` must return one bool, True where the query may see the key; of a number, give x != 0. "
            f"Got {tracing.described(shape)}."
        )
    if shape.shape != ():
        raise ValueError(
            "`mask_mod` is called on one query and one key and must return one bool: the shape must be (). "
            f"Got a result of shape {shape.shape}."
        )
    if closed.effects:
        raise TypeError(
            "`mask_mod` must have no side effects: it is called for some pairs twice and for others never. "
            f"Got {', '.join(map(str, closed.effects))}."
        )
    inner = tuple(id(array) for program in _programs(closed.jaxpr) for array in program.consts)
    arrays = tuple(lax.stop_gradient(jnp.asarray(constant)) for constant in closed.consts)
    return TracedMaskMod(MaskMod(str(closed.jaxpr), inner, tracing.without_constants(closed)), arrays)


def _programs(jaxpr: Any) -> list[ClosedJaxpr]:
    """Return the programs inside a program, with what they close over."""
    leaves: list[Any] = [leaf for equation in tracing.equations(jaxpr) for leaf in jax.tree.leaves(equation.params)]
    return [leaf for leaf in leaves if isinstance(leaf, ClosedJaxpr)]
