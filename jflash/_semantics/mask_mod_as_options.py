"""Recognition of a `mask_mod` that is causality or a window, and of segments in one.

Kernels find the tiles of a window without a map of them. What is said of segments is for a hint: ids that are not known
before the call may be in any order, for which a map is the better way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jflash._semantics import program
from jflash._semantics.mask_mod import MaskMod

_MOST_EQUATIONS = 64
"""A longer program is not one of these."""

_FARTHEST = 2**28
"""The largest constant that is followed. Sums of it and of indices, which are below 2**29, do not wrap in 32 bits."""


class Says(NamedTuple):
    """A claim of a program: least <= query - key <= most, `None` for no bound, and whether both share a segment."""

    least: int | None = None
    most: int | None = None
    segments: bool = False

    def __and__(self, other: Says) -> Says:
        """Return what both say together."""
        return Says(
            max((bound for bound in (self.least, other.least) if bound is not None), default=None),
            min((bound for bound in (self.most, other.most) if bound is not None), default=None),
            self.segments or other.segments,
        )

    @property
    def has_own_key(self) -> bool:
        """Whether the bounds let a query see its own key, as those of every option do."""
        return (self.least or 0) <= 0 <= (self.most or 0)

    def options(self, keys: int) -> str:
        """Return the options that say the same, as they are written."""
        least, most = self.least, self.most
        written = ["is_causal=True"] * (least == 0)
        if most is not None or (least is not None and least < 0):
            right = 0 if least == 0 else keys if least is None else -least
            written.append(f"local_window_size=({keys if most is None else most}, {right})")
        written += ["segment_ids=ids"] * self.segments
        return ", ".join(written)


@dataclasses.dataclass(frozen=True)
class _Node:
    """A value of the program, and how it is made of the arguments."""

    name: str
    facts: str = ""
    inputs: tuple[Any, ...] = ()
    line: tuple[int, int, int] | None = dataclasses.field(default=None, compare=False)
    """(a, b, c) of a * query + b * key + c, if it is that."""
    says: Says | None = dataclasses.field(default=None, compare=False)

    def with_key(self) -> _Node:
        """Return the same with the key in the query's place."""
        inputs = tuple(x.with_key() if isinstance(x, _Node) else x for x in self.inputs)
        return _Node("key" if self.name == "query" else self.name, self.facts, inputs)

    def has(self, name: str) -> bool:
        """Return whether an argument has a part in it."""
        return self.name == name or any(isinstance(x, _Node) and x.has(name) for x in self.inputs)


@functools.lru_cache(maxsize=64)
def says(mask_mod: MaskMod) -> Says | None:
    """Return what the function says of who sees whom, if options can say all of that; else `None`."""
    jaxpr = mask_mod.jaxpr.jaxpr
    if len(jaxpr.eqns) > _MOST_EQUATIONS:
        return None
    arguments = [_Node("batch"), _Node("head"), _Node("query", line=(1, 0, 0)), _Node("key", line=(0, 1, 0))]
    arrays = [_Node("array", str(number)) for number in range(len(jaxpr.constvars))]
    (result,) = program.evaluate(jaxpr, arrays, arguments, _follow)
    found = result.says if isinstance(result, _Node) else None
    return found if found is not None and found.has_own_key else None


def bounds(mask_mod: MaskMod) -> tuple[int | None, int | None] | None:
    """Return (left, right) if query i sees key j just when i - left <= j <= i + right; `None` if more is said.

    A side that is `None` has no bound.
    """
    found = says(mask_mod)
    if found is None or found.segments:
        return None
    return found.most, None if found.least is None else -found.least


def _follow(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    """Return the equation's results as nodes."""
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr")
    if name in ("jit", "pjit") and isinstance(inner, ClosedJaxpr):
        consts = [_Node("inner array", str(id(array))) for array in inner.consts]
        return program.evaluate(inner.jaxpr, consts, inputs, _follow)
    facts = str(sorted((key, str(value)) for key, value in params.items()))
    given = tuple(x if isinstance(x, _Node) else str(x) for x in inputs)
    return [
        _Node(f"{name} {place}", facts, given, _line(name, inputs, out.aval.dtype), _says(name, inputs))
        for place, out in enumerate(equation.outvars)
    ]


def _line(name: str, inputs: list[Any], dtype: Any) -> tuple[int, int, int] | None:
    """Return the result of a sum or a conversion as a line, where it is exact."""
    lines = [_as_line(x) for x in inputs]
    is_exact = jnp.issubdtype(dtype, jnp.signedinteger) and np.dtype(dtype).itemsize >= 4
    if not is_exact or None in lines:
        return None
    if name == "convert_element_type":
        return lines[0]
    if name in ("add", "sub"):
        sign = 1 if name == "add" else -1
        x, y = (line for line in lines if line is not None)
        a, b, c = x[0] + sign * y[0], x[1] + sign * y[1], x[2] + sign * y[2]
        return (a, b, c) if max(abs(a), abs(b)) <= 1 and abs(c) <= _FARTHEST else None
    return None


def _as_line(x: Any) -> tuple[int, int, int] | None:
    if isinstance(x, _Node):
        return x.line
    is_number = np.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.integer) and abs(int(x)) <= _FARTHEST
    return (0, 0, int(x)) if is_number else None


def _says(name: str, inputs: list[Any]) -> Says | None:
    nodes = [x for x in inputs if isinstance(x, _Node)]
    if name == "and" and len(nodes) == 2 and all(node.says is not None for node in nodes):
        one, other = (node.says for node in nodes if node.says is not None)
        return one & other
    if name == "eq" and len(nodes) == 2 and None in (nodes[0].line, nodes[1].line):
        for one, other in (nodes, nodes[::-1]):
            of_query = one.has("query") and not one.has("key") and not one.has("head")
            if of_query and one.with_key() == other:
                return Says(segments=True)
        return None
    compare = _COMPARED.get(name)
    return None if compare is None else _bounds(compare, *inputs)


_COMPARED: dict[str, Callable[[int], Says]] = {
    "le": lambda c: Says(most=-c),
    "lt": lambda c: Says(most=-c - 1),
    "ge": lambda c: Says(least=-c),
    "gt": lambda c: Says(least=1 - c),
    "eq": lambda c: Says(-c, -c),
}
"""For each comparison, what it says of query - key + c beside 0."""
_MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


def _bounds(compare: Callable[[int], Says], x: Any, y: Any) -> Says | None:
    name = next(name for name, known in _COMPARED.items() if known is compare)
    for one, other, by in ((x, y, name), (y, x, _MIRRORED[name])):
        if isinstance(one, _Node) and one.name == "abs 0" and not isinstance(other, _Node) and by in ("le", "lt"):
            # |d| <= c is d <= c and -d <= c.
            line = _as_line(one.inputs[0]) if isinstance(one.inputs[0], _Node) else None
            limit = _as_line(other)
            if line is None or limit is None:
                return None
            sides = [_of_line((sign * line[0], sign * line[1], sign * line[2] - limit[2]), by) for sign in (1, -1)]
            return None if sides[0] is None or sides[1] is None else sides[0] & sides[1]
    left, right = _as_line(x), _as_line(y)
    if left is None or right is None:
        return None
    return _of_line((left[0] - right[0], left[1] - right[1], left[2] - right[2]), name)


def _of_line(line: tuple[int, int, int], name: str) -> Says | None:
    match line:
        case (1, -1, c):
            return _COMPARED[name](c)
        case (-1, 1, c):
            return _COMPARED[_MIRRORED[name]](-c)
        case _:
            return None
