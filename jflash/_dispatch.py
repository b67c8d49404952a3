"""The table of backends, and the choice among them.

A backend is a module with these functions:

    unsupported(spec, platform) -> str | None   why it cannot serve the call, in words for the user; None: it can
    forward(spec, operands) -> out, lse         out [B, T, N, D]; lse [B, N, T] in natural logarithms, -inf: saw no key

It may also have these:

    tangent(spec, operands, results, tangents)  the tangents of out and lse from those of the operands, an `Operands`
                                                with `None` for a tangent of 0; linear in them
    backward(spec, operands, residuals)         the gradients, an `Operands` with `None` for what has no gradient: the
                                                tangent's transpose
    unsupported_tangent(spec), unsupported_backward(spec) -> str | None
                                                why its own cannot serve a call that its forward serves
    describe(spec, platform) -> str             what it would launch: for `explain(verbose=True)`
    program(platform) -> str                    platforms of one name share a program, which is traced for the first of
                                                them; without it, all platforms that it serves share one
    asked_before(spec, platform) -> str | None  the backend before which a call that names none asks this one there;
                                                None: its place is that of the table
    takes_tokens(spec) -> bool                  whether its forward takes queries that are rows of one array
                                                (`Spec.tokens`); without it they are gathered before

The tangent or backward that a backend lacks is `xla`'s, and so is every derivative beyond them. A backend with
`DIFFERENTIATED_BY_JAX = True` has a forward that JAX differentiates itself, where that backend alone serves. A backend
with `ONLY_BY_NAME = True` serves only calls that name it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jflash_metal
from jflash._backends import cudnn, mosaic_gpu, mosaic_gpu_mma, reference, xla
from jflash._choice import Choice, Program
from jflash._platform import Platform
from jflash._semantics import tokens
from jflash._semantics.spec import Spec

BACKENDS: Mapping[str, Any] = {
    "mosaic_gpu": mosaic_gpu,
    "mosaic_gpu_mma": mosaic_gpu_mma,
    "cudnn": cudnn,
    "xla": xla,
    "reference": reference,
    "metal": jflash_metal,
}
"""The backends, in the order in which `implementation=None` asks them, where none says otherwise (`in_order`)."""
Names = tuple[str, ...] | None
"""The backends to ask, in order; `None`: all that do not serve only by name, in the order of the platform."""

_log = logging.getLogger("jflash")


class Functions(NamedTuple):
    """A backend's functions, with `xla`'s in place of those that it lacks."""

    forward: Callable[..., Any]
    tangent: Callable[..., Any]
    backward: Callable[..., Any]


def functions(name: str, spec: Spec) -> Functions:
    """Return the functions of a backend, for a call that it serves."""
    whose = {kind: _whose(name, kind, spec)[0] for kind in Functions._fields}
    found = Functions(**{kind: getattr(BACKENDS[backend], kind) for kind, backend in whose.items()})
    takes_tokens = getattr(BACKENDS[name], "takes_tokens", None)
    if spec.tokens is None or (takes_tokens is not None and takes_tokens(spec)):
        return found
    return found._replace(forward=functools.partial(tokens.forward_of_entries, found.forward))


def _whose(name: str, kind: str, spec: Spec) -> tuple[str, str | None]:
    """Return the backend whose function of a kind serves where `name` does, and the reason, if any, why not `name`'s
    own."""
    own = BACKENDS[name]
    if not hasattr(own, kind):
        return "xla", None
    ask = getattr(own, f"unsupported_{kind}", None)
    reason = None if ask is None else ask(spec)
    return name if reason is None else "xla", reason


def candidates(implementation: Any) -> Names:
    """Return the names to ask for the argument `implementation`: one, several, or `None`.

    Raises:
      TypeError: if `implementation` is not a name, a sequence of names or None.
      ValueError: if it names a backend that does not exist, or none.
    """
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`implementation` must be a name, a sequence of names or None. Got {implementation!r}.")
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or not names:
        raise ValueError(
            f"`implementation` must name some of {', '.join(BACKENDS)}; leave it out to have the first that can serve. "
            f"Got {implementation!r}."
        )
    return tuple(names)


def in_order(spec: Spec, names: Names, platform: Platform) -> tuple[str, ...]:
    """Return the backends to ask for a call on a platform, in order."""
    if names is not None:
        return names
    order = [name for name, backend in BACKENDS.items() if not getattr(backend, "ONLY_BY_NAME", False)]
    for name in tuple(order):
        asked_before = getattr(BACKENDS[name], "asked_before", None)
        other = None if asked_before is None else asked_before(spec, platform)
        if other is not None:
            order.remove(name)
            order.insert(order.index(other), name)
    return tuple(order)


def ask(spec: Spec, names: Names, platform: Platform) -> tuple[str | None, dict[str, str]]:
    """Return the first backend that can serve `spec`, and why each one before it cannot."""
    refusals: dict[str, str] = {}
    for name in in_order(spec, names, platform):
        reason = _unsupported(name, spec, platform)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    return None, refusals


def _unsupported(name: str, spec: Spec, platform: Platform) -> str | None:
    """Why a backend cannot serve a call; only the definition has no tiles to plan."""
    if spec.symbolic_size is not None and BACKENDS[name] is not reference:
        return f"it plans tiles for sizes that are known, and {spec.symbolic_size} is symbolic."
    return BACKENDS[name].unsupported(spec, platform)


def derivatives(name: str, spec: Spec) -> str:
    """Say in a line whose derivatives a call has that this backend serves."""
    backend = BACKENDS[name]
    if spec.pages is not None:
        return "derivatives: none of a call with pages"
    if getattr(backend, "DIFFERENTIATED_BY_JAX", False):
        return "derivatives: all by JAX, of the forward"
    if backend is xla:
        return "derivatives: all by xla"
    whose = {kind: _whose(name, kind, spec) for kind in ("tangent", "backward")}
    why = {kind: "" if reason is None else f" ({name}: {reason})" for kind, (_, reason) in whose.items()}
    each = ", ".join(f"{kind} by {backend}{why[kind]}" for kind, (backend, _) in whose.items())
    return f"derivatives: {each}, all others by xla"


def ask_split(spec: Spec, names: Names, platform: Platform, whole: str) -> tuple[str | None, dict[str, str]]:
    """Return what `ask` does of one device's part of a call with split sequences, beginning with the backend that
    serves whole ones."""
    order = in_order(spec, names, platform)
    return ask(dataclasses.replace(spec, partial=True), order[order.index(whole) :], platform)


def serving_split(program: Program, spec: Spec, names: Names) -> str:
    """Return the backend that serves in the place of `program`'s if a call's shardings turn out to split its sequences.

    Raises:
      NotImplementedError: if none of the backends that were asked can serve, with the reasons.
    """
    name, refusals = ask_split(spec, names, program.platform, program.backend)
    if name is None:
        raise NotImplementedError(
            f"No implementation can serve this call with its sequences split over devices.\n{listing(refusals)}"
        )
    return name


def select(spec: Spec, names: Names, targets: Mapping[str, Platform]) -> Choice:
    """Return the first backend on each platform that can serve `spec`.

    It asks the backends, and never catches an exception to find out.

    Raises:
      NotImplementedError: if none can serve on any platform, with the reasons on the first.
    """
    answers = {target: ask(spec, names, platform) for target, platform in targets.items()}
    here = next(iter(targets))
    chosen, refusals = answers[here]
    served: dict[tuple[str, str | None], list[str]] = {}
    for target, (name, _) in answers.items():
        if name is not None:
            program = getattr(BACKENDS[name], "program", None)
            served.setdefault((name, program and program(targets[target])), []).append(target)
    if not served:
        raise NotImplementedError(f"No implementation can serve this call.\n{listing(refusals)}")
    _log.debug("%s serves on %s; refused by: %s", chosen, targets[here], refusals or "none")
    return Choice(
        tuple(Program(name, tuple(where), targets[where[0]]) for (name, _), where in served.items()),
        tuple((target, listing(reasons)) for target, (name, reasons) in answers.items() if name is None),
        names,
    )


def listing(refusals: Mapping[str, str]) -> str:
    """Return the refusals as text, with an indented line for each."""
    return "\n".join(f"  {name}: {reason}" for name, reason in refusals.items())
