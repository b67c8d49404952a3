"""The equations of a traced program, for tests of what it makes."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All of a program, and of the programs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
