"""Which backend's program JAX lowers on which platform.

`jax.lax.platform_dependent` holds a program for each backend of a `Choice`, and lowers the one that serves. The
programs give results of one form, so a `Choice` can stand wherever one backend can: under the rules for derivatives,
`vmap` and sharding. A backend that serves everywhere is called as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

from jflash import _dispatch, _platform, _sharding
from jflash._dispatch import Choice, Program
from jflash._semantics.spec import Operands, Residuals, Spec


def forward(choice: Choice, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of the backend that serves."""
    return _by_platform(choice, lambda backend, operands: backend.forward(spec, operands), operands)


def backward(choice: Choice, spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """The gradients of the backend that serves, `None` for what has none or is not differentiated."""

    def gradients(backend: Any, operands: Operands, residuals: Residuals) -> Operands:
        if hasattr(backend, "backward"):
            found = backend.backward(spec, operands, residuals)
        else:
            _, pull_back = jax.vjp(functools.partial(backend.forward, spec), operands)
            (found,) = pull_back((residuals.d_out, residuals.d_lse))
        return _in_full(found, operands, spec.constants)

    return _by_platform(choice, gradients, operands, residuals)


def refuse_unserved(choice: Choice, operands: Operands) -> Operands:
    """The operands. Lowering them for a platform on which no backend serves raises NotImplementedError."""
    if not choice.refusals:
        return operands

    def refusal(reasons: str) -> Callable[[Array], Array]:
        return lambda query: _sharding.varying_alike(
            _refusal.bind(shape=query.shape, dtype=query.dtype, reasons=reasons), like=query
        )

    served = [target for program in choice.programs for target in program.targets]
    branches: dict[str, Callable[[Array], Array]] = {target: refusal(reasons) for target, reasons in choice.refusals}
    branches |= dict.fromkeys(served, lambda query: query)
    default = branches.pop(_platform.ELSEWHERE)
    return operands._replace(query=lax.platform_dependent(operands.query, default=default, **branches))


def _by_platform(choice: Choice, call: Callable[..., Any], *args: Any) -> Any:
    """`call` of the backend that serves, and of arrays."""

    def program_of(program: Program) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _platform.lowered_for(program.platform):
                return call(_dispatch.BACKENDS[program.backend], *args)

        return run

    if len(choice.programs) == 1:
        return program_of(choice.programs[0])(*args)
    branches: dict[str, Callable[..., Any]] = {}
    for program in choice.programs:
        run = program_of(program)
        alike = lambda *args, run=run: _sharding.varying_alike(run(*args), like=args)
        branches |= dict.fromkeys(program.targets, alike)
    # Where it is refused, `refuse_unserved` has raised before.
    default = branches.get(_platform.ELSEWHERE)
    others = {target: branch for target, branch in branches.items() if branch is not default}
    return lax.platform_dependent(*args, default=default, **others)


def _in_full(gradients: Operands, operands: Operands, constants: frozenset[str]) -> Operands:
    """The same form from every backend: one leaves out a gradient that is zero, another gives one not asked for."""
    unasked = {name: jax.tree.map(lambda _: None, getattr(operands, name)) for name in constants}

    def full(operand: Array | None, gradient: Array | None) -> Array | None:
        if operand is None or not jnp.issubdtype(operand.dtype, jnp.inexact):
            return None
        return jnp.zeros_like(operand) if gradient is None else gradient

    return jax.tree.map(full, operands._replace(**unasked), gradients, is_leaf=lambda leaf: leaf is None)


def _refuse(*_: Any, reasons: str, **shape_and_dtype: Any) -> NoReturn:
    raise NotImplementedError(f"No implementation can serve this call on the platform it is lowered for.\n{reasons}")


# Without inputs, so that it needs no rules for derivatives and `vmap`.
_refusal = Primitive("jflash_refusal")
_refusal.def_impl(_refuse)
_refusal.def_abstract_eval(lambda *, shape, dtype, reasons: ShapedArray(shape, dtype))
mlir.register_lowering(_refusal, _refuse)
