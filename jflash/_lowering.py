"""Which backend's program JAX lowers on which platform.

Where several backends serve, each on platforms of its own, one primitive holds the program of each, and its lowering
takes the one that serves. `jax.lax.platform_dependent` cannot do that: when a call is exported for two platforms, it
lowers both programs for both, and a kernel can be lowered for its own platform only. The programs give results of one
form, so a `Choice` can stand wherever one backend can. The rules for derivatives, `vmap` and sharding are above it, so
the primitive needs none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
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
        return _in_full(found, operands, spec.undifferentiated)

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

    def run(program: Program, *args: Any) -> Any:
        with _platform.lowered_for(program.platform):
            return call(_dispatch.BACKENDS[program.backend], *args)

    if len(choice.programs) == 1:
        return run(choice.programs[0], *args)
    leaves, tree = jax.tree.flatten(args)

    def traced(program: Program) -> tuple[ClosedJaxpr, Any]:
        def flat(*leaves: Any) -> Any:
            return _sharding.varying_alike(run(program, *jax.tree.unflatten(tree, leaves)), like=leaves)

        return jax.make_jaxpr(flat, return_shape=True)(*leaves)

    jaxprs, results = zip(*map(traced, choice.programs), strict=True)
    form, *others = [jax.tree.map(lambda array: (array.shape, array.dtype), result) for result in results]
    assert all(other == form for other in others), (form, others)
    targets = tuple(program.targets for program in choice.programs)
    return jax.tree.unflatten(jax.tree.structure(results[0]), _one_of.bind(*leaves, jaxprs=jaxprs, targets=targets))


def _in_full(gradients: Operands, operands: Operands, undifferentiated: frozenset[str]) -> Operands:
    """The same form from every backend: one leaves out a gradient that is zero, another gives one not asked for."""
    unasked = {name: jax.tree.map(lambda _: None, getattr(operands, name)) for name in undifferentiated}

    def full(operand: Array | None, gradient: Array | None) -> Array | None:
        if operand is None or not jnp.issubdtype(operand.dtype, jnp.inexact):
            return None
        return jnp.zeros_like(operand) if gradient is None else gradient

    return jax.tree.map(full, operands._replace(**unasked), gradients, is_leaf=lambda leaf: leaf is None)


def _lower_one(ctx: mlir.LoweringRuleContext, *args: Any, jaxprs: Sequence[ClosedJaxpr], targets: Any) -> Any:
    platform, *_ = ctx.platforms or ctx.module_context.platforms
    by_target = {target: jaxpr for jaxpr, own in zip(jaxprs, targets, strict=True) for target in own}
    jaxpr = by_target[platform if platform in by_target else _platform.ELSEWHERE]
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


def _compute_one(*args: Any, **programs: Any) -> Any:
    """Under `jax.disable_jit`. Only a lowering knows the platform."""
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_one_of.bind, **programs))(*args)


_one_of = Primitive("jflash_one_of")
_one_of.multiple_results = True
_one_of.def_impl(_compute_one)
_one_of.def_abstract_eval(lambda *_, jaxprs, targets: jaxprs[0].out_avals)
mlir.register_lowering(_one_of, _lower_one)
for _name in ("cpu", "cuda", "rocm", "tpu"):
    # Each a rule of its own: where a program is exported for several, JAX asks for each in turn.
    mlir.register_lowering(_one_of, functools.partial(_lower_one), platform=_name)


def _refuse(*_: Any, reasons: str, **shape_and_dtype: Any) -> NoReturn:
    raise NotImplementedError(f"No implementation can serve this call on the platform it is lowered for.\n{reasons}")


# It has no inputs, so it needs no rules for derivatives and `vmap`.
_refusal = Primitive("jflash_refusal")
_refusal.def_impl(_refuse)
_refusal.def_abstract_eval(lambda *, shape, dtype, reasons: ShapedArray(shape, dtype))
mlir.register_lowering(_refusal, _refuse)
