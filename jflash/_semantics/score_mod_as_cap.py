"""Recognition of a `score_mod` that is a soft cap: kernels compute a cap in fewer steps than other functions of a
logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jflash._semantics import program
from jflash._semantics.score_mod import ScoreMod

_ROUNDING = 2.0**-20
"""The largest relative error by which two float32 factors still count as inverse to each other."""


class _Form(NamedTuple):
    """The expression outer * tanh(inner * logit), or inner * logit without `outer`."""

    inner: float
    outer: float | None = None

    def times(self, factor: float) -> _Form:
        return _Form(self.inner * factor) if self.outer is None else _Form(self.inner, self.outer * factor)


def cap_of(score_mod: ScoreMod) -> float | None:
    """Return c if the function is c * tanh(logit / c) and nothing else, as `logits_soft_cap` has it; else `None`."""
    arguments = [_Form(1.0), None, None, None, None]
    (form,) = program.evaluate(score_mod.jaxpr.jaxpr, [None] * len(score_mod.jaxpr.consts), arguments, _follow)
    if not isinstance(form, _Form) or form.outer is None or not 0 < form.outer < math.inf:
        return None
    return form.outer if abs(form.inner * form.outer - 1) < _ROUNDING else None


def _follow(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    """Return an equation's results as `_Form`, or `None` for results that have another form."""
    match equation.primitive.name, inputs:
        case "jit" | "pjit", _:
            inner = equation.params["jaxpr"]
            return program.evaluate(inner.jaxpr, inner.consts, inputs, _follow)
        case "tanh", [_Form(inner, None)]:
            return [_Form(inner, 1.0)]
        case ("mul", [_Form() as form, factor]) | ("mul", [factor, _Form() as form]) if _is_number(factor):
            return [form.times(float(factor))]
        case "div", [_Form() as form, divisor] if _is_number(divisor) and divisor != 0:
            return [form.times(1 / float(divisor))]
        case _:
            return [None] * len(equation.outvars)


def _is_number(value: Any) -> bool:
    return value is not None and not isinstance(value, _Form) and np.ndim(value) == 0
