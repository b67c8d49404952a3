"""The removal of source locations from the program that `custom_partitioning` gives to each device.

JAX lowers that program to a module with a table of stack frames of its own. XLA copies its operations into the caller's
module and keeps their frame numbers, which there stand for other frames or for none (jax 0.11 and 0.12). Where a call
and the operations that it calls both have such numbers, XLA adds frames whose parent does not exist yet. When the table
grows to that number, a frame can become its own ancestor, and XLA's search of the ancestors (`StackFrames::IsPrefix`)
never ends: the program never compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.source_info_util import SourceInfo
from jaxtyping import Array


def without_locations(function: Callable[..., tuple[Array, ...]]) -> Callable[..., list[Array]]:
    """Return `function` as one call that has a location, of operations that have none. All of them keep their names."""

    @functools.cache
    def stripped(jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[nowhere(equation) for equation in jaxpr.eqns])

    def nowhere(equation: JaxprEqn) -> JaxprEqn:
        params = {name: stripped_within(param) for name, param in equation.params.items()}
        return equation.replace(params=params, source_info=SourceInfo(None, equation.source_info.name_stack))

    def stripped_within(param: Any) -> Any:
        if isinstance(param, Jaxpr):
            return stripped(param)
        return tuple(map(stripped_within, param)) if type(param) is tuple else param

    def call(*arrays: Array) -> list[Array]:
        # JAX gives a location to each equation that it evaluates. `jit` makes them one, whose inside JAX leaves alone.
        return jaxpr_as_fun(stripped(jax.make_jaxpr(jax.jit(function))(*arrays)))(*arrays)

    return call
