"""Attention in JAX: jflash's, jax.nn's, and that of other libraries."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

import jflash
from jflash._platform import Platform
from jflash.bench import clocks, packages
from jflash.bench.cases import DIFFERENTIATED, Case, Data, Work, options


@dataclasses.dataclass(frozen=True)
class InJax:
    """A function with the arguments of `jax.nn.dot_product_attention`, or some of them, and maybe more."""

    package: str
    load: Callable[[], Callable[..., Any]]
    """Gives the function; called only if the package is here."""
    implementation: str | None = None
    """The one to ask for, by the function's argument of that name."""
    needs_nvidia: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    @property
    def packages(self) -> tuple[str, ...]:
        """Itself."""
        return (self.package,)

    def missing(self, platform: Platform) -> str | None:
        """If it is not installed, for another platform, or cannot be imported."""
        reason = packages.missing(self.package, self.package)
        if reason is not None:
            return reason
        if self.needs_nvidia and not clocks.on_nvidia():
            return f"It needs an NVIDIA GPU, and this is {platform}."
        return packages.unimportable(self.package, self.load)

    def refuses(self, case: Case, names: Sequence[str]) -> str | None:
        """A dtype or an argument that it does not have."""
        if case.dtype not in self.dtypes:
            return f"It takes {' and '.join(self.dtypes)}, not {case.dtype}."
        parameters = inspect.signature(self.load()).parameters.values()
        unknown = [name for name in names if name not in {parameter.name for parameter in parameters}]
        if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return f"It has no argument {', '.join(unknown)}."
        return None

    def serving(self, case: Case, data: Data) -> str | None:
        """The one asked for, or the one that jflash chooses."""
        if self.package != "jflash" or self.implementation is not None:
            return self.implementation
        return jflash.explain(**data.arguments, **options(case)).partition(" ")[0]

    def prepare(self, case: Case, work: Work, data: Data) -> clocks.Prepared:
        """Compiled by JAX."""
        chosen = {} if self.implementation is None else {"implementation": self.implementation}
        function, arguments = function_of_arrays(case, work, data, functools.partial(self.load(), **chosen))
        return clocks.prepare(function, *arguments)


def function_of_arrays(
    case: Case, work: Work, data: Data, attention: Callable[..., Any] = jflash.attention
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The work as a function of arrays, and these."""
    attend = functools.partial(attention, **options(case))
    if work == "fwd":
        return lambda arguments: attend(**arguments), (data.arguments,)
    variable = {name: array for name, array in data.arguments.items() if name in DIFFERENTIATED}
    constant = {name: array for name, array in data.arguments.items() if name not in DIFFERENTIATED}

    if work == "jvp":
        # Along the arrays themselves: time does not depend on the direction.
        push = lambda variable, constant: jax.jvp(lambda moved: attend(**moved, **constant), (variable,), (variable,))
        return push, (variable, constant)

    def both(variable: dict[str, Array], constant: dict[str, Array], cotangent: Array) -> Any:
        out, pull_back = jax.vjp(lambda variable: attend(**variable, **constant), variable)
        return out, pull_back(cotangent)

    return both, (variable, constant, data.cotangent)
