"""The mask in a `score_mod` that chooses -inf by position, as `jnp.where(key_index <= query_index, logit, -jnp.inf)`.

A key whose logit is -inf counts as not seen, whatever the logit was. So tiles of such keys need no visit, as if a
`mask_mod` hid them. Only a choice is understood: of a logit to which -inf is added, NaN may come.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from jflash._semantics import program
from jflash._semantics.mask_mod import TracedMaskMod, trace_mask_mod
from jflash._semantics.score_mod import ScoreMod, equations

_AS_IT_IS = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
"""Operations that leave -inf what it is."""


@dataclasses.dataclass(frozen=True)
class _OfLogit:
    """A number that depends on the logit."""

    visible: Any
    """Whether it may be other than -inf: a bool, or an array of one by position."""


@functools.lru_cache(maxsize=64)
def hides(score_mod: ScoreMod | None) -> bool:
    """Return whether a function chooses -inf by position, as far as its program shows."""
    if score_mod is None or not any(one.primitive.name == "select_n" for one in equations(score_mod.jaxpr.jaxpr)):
        return False
    known: list[bool] = []

    def look(arrays: Sequence[Array], *indices: Array) -> None:
        known.append(_visible(score_mod, arrays, indices) is True)

    jax.eval_shape(look, score_mod.jaxpr.consts, *[jax.ShapeDtypeStruct((), jnp.int32)] * 4)
    return not known[0]


def mask_of(score_mod: ScoreMod, arrays: Sequence[Array]) -> TracedMaskMod:
    """Return where a function of `arrays`, which it closes over in their own shapes, may give more than -inf."""
    return trace_mask_mod(lambda *indices: jnp.asarray(_visible(score_mod, arrays, indices), bool))


def _visible(score_mod: ScoreMod, arrays: Sequence[Array], indices: Sequence[Array]) -> Any:
    """Return whether the function's logit may be other than -inf, of a batch entry, head, query and key."""
    (result,) = program.evaluate(score_mod.jaxpr.jaxpr, arrays, [_OfLogit(True), *indices], _follow)
    return _may_be_seen(result)


def _may_be_seen(value: Any) -> Any:
    """Return whether a number may be other than -inf: a bool if that is known of all positions."""
    if isinstance(value, _OfLogit):
        return value.visible
    if np.ndim(value) > 0:
        return True
    return value != -jnp.inf if isinstance(value, Tracer) else float(value) != -math.inf


def _follow(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    """Return an equation's results: those that do not depend on the logit as they are."""
    if not any(isinstance(value, _OfLogit | Tracer) for value in inputs):
        with jax.ensure_compile_time_eval():
            return program.apply(equation, inputs)
    if not any(isinstance(value, _OfLogit) for value in inputs):
        return program.apply(equation, inputs)
    match equation.primitive.name:
        case "jit" | "pjit":
            inner = equation.params["jaxpr"]
            return program.evaluate(inner.jaxpr, inner.consts, inputs, _follow)
        case "select_n" if equation.outvars[0].aval.shape == ():
            return [_OfLogit(_chosen(*inputs))]
        case name if name in _AS_IT_IS:
            return [_OfLogit(_may_be_seen(inputs[0]))]
        case _:
            return [_OfLogit(True)] * len(equation.outvars)


def _chosen(which: Any, *cases: Any) -> Any:
    """Return whether the case that is chosen may be other than -inf."""
    seen = [_may_be_seen(case) for case in cases]
    if all(one is True for one in seen):
        return True
    if isinstance(which, _OfLogit):
        # Any of them may be chosen.
        return True if any(one is True for one in seen) else functools.reduce(jnp.logical_or, seen)
    return lax.select_n(which, *(jnp.asarray(one, bool) for one in seen))
