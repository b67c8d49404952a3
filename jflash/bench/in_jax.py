"""The attention of JAX's libraries: jflash's, jax.nn's, and that of others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import jflash
from jflash._platform import Platform
from jflash.bench import clocks, mask_mods, packages, score_mods
from jflash.bench.cases import DIFFERENTIATED, Case, Data, Work, options


@dataclasses.dataclass(frozen=True)
class InJax:
    """A function with the arguments of `jax.nn.dot_product_attention`, or some of them, and maybe more."""

    package: str
    load: Callable[[], Callable[..., Any]]
    """A function that imports and returns the library's attention; called only if the package is here."""
    implementation: str | None = None
    """The implementation to ask for, by the function's argument of that name."""
    needs_nvidia: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of the packages whose versions are recorded."""
        return (self.package,)

    def missing(self, platform: Platform) -> str | None:
        """Say why the library is not here: not installed, for another platform, or not importable; `None`: it is."""
        reason = packages.missing(self.package, self.package.replace("-", "_"))
        if reason is not None:
            return reason
        if self.needs_nvidia and not clocks.on_nvidia():
            return f"It needs an NVIDIA GPU, and this is {platform}."
        return packages.unimportable(self.package, self.load)

    def refuses(self, case: Case, names: Sequence[str]) -> str | None:
        """Say which dtype or argument of a case the library does not have; `None`: it has all."""
        if case.dtype not in self.dtypes:
            return f"It takes {' and '.join(self.dtypes)}, not {case.dtype}."
        unknown = [name for name in names if not self._takes(name)]
        if case.score_mod is not None and self._form(case.score_mod) is None:
            unknown += ["score_mod", score_mods.SCORE_MODS[case.score_mod].stand_in]
        if case.mask_mod is not None and not self._takes("mask_mod"):
            unknown.append("mask_mod")
        return f"It has no argument {', '.join(unknown)}." if unknown else None

    def _takes(self, name: str) -> bool:
        parameters = inspect.signature(self.load()).parameters
        return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def _form(self, name: score_mods.Name) -> score_mods.Form | None:
        forms: tuple[score_mods.Form, ...] = ("score_mod", score_mods.SCORE_MODS[name].stand_in)
        return next((form for form in forms if self._takes(form)), None)

    def serving(self, case: Case, data: Data) -> str | None:
        """Return the implementation asked for, or the one that jflash chooses."""
        if self.package != "jflash" or self.implementation is not None:
            return self.implementation
        functions = _functions(case, "score_mod", data.captured)
        return jflash.explain(**data.arguments, **options(case), **functions).partition(" ")[0]

    def prepare(self, case: Case, work: Work, data: Data) -> clocks.Prepared:
        """Return the work, compiled by JAX."""
        chosen = {} if self.implementation is None else {"implementation": self.implementation}
        form = None if case.score_mod is None else self._form(case.score_mod)
        function, arguments = function_of_arrays(case, work, data, functools.partial(self.load(), **chosen), form)
        return clocks.prepare(function, *arguments)


def function_of_arrays(
    case: Case,
    work: Work,
    data: Data,
    attention: Callable[..., Any] = jflash.attention,
    form: score_mods.Form | None = "score_mod",
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the work as a function of arrays, and these arrays.

    `form` is how `attention` is asked for what a `score_mod` does.
    """
    arrays = {**data.arguments, **data.captured}

    def attend(**arrays: Array) -> Any:
        captured = {name: arrays.pop(name) for name in data.captured}
        return attention(**arrays, **options(case), **_functions(case, form, captured))

    if work == "fwd":
        return lambda arguments: attend(**arguments), (arrays,)
    variable = {name: array for name, array in arrays.items() if name in DIFFERENTIATED}
    constant = {name: array for name, array in arrays.items() if name not in DIFFERENTIATED}

    if work == "jvp":
        # The direction is that of the arrays themselves: time does not depend on it.
        push = lambda variable, constant: jax.jvp(lambda moved: attend(**moved, **constant), (variable,), (variable,))
        return push, (variable, constant)

    def both(variable: dict[str, Array], constant: dict[str, Array], cotangent: Array) -> Any:
        out, pull_back = jax.vjp(lambda variable: attend(**variable, **constant), variable)
        return out, pull_back(cotangent)

    return both, (variable, constant, data.cotangent)


def _functions(case: Case, form: score_mods.Form | None, captured: dict[str, Array]) -> dict[str, Any]:
    """Return the arguments by which the case's `mask_mod` and `score_mod` are asked for, if it has them."""
    given: dict[str, Any] = {} if case.mask_mod is None else {"mask_mod": mask_mods.bound(case.mask_mod, captured)}
    name = case.score_mod
    if name is None or form is None:
        return given
    if form == "bias":
        return given | {form: score_mods.bias(name, captured, case.heads, case.queries, case.keys, case.dtype)}
    return given | {form: score_mods.CAP if form == "logits_soft_cap" else score_mods.bound(name, jnp, captured)}
