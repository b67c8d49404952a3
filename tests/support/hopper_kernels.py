"""The kernels without a GPU: one call through them in Pallas' interpreter, and the races that it found."""

from __future__ import annotations

import dataclasses
import inspect
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER, Family
from plain_attention import Call, Results, Tangents

import jflash
from jflash import _api, _canonical, _coverage
from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu import plan, tangent_kernel
from jflash._semantics import spec as semantics
from jflash._semantics.spec import Operands, Residuals, Spec


def canonical(call: Call, **options: object) -> tuple[Spec, Operands]:
    """What a backend is given for a call."""
    arguments = oracle.arguments(call) | options
    return canonical_arguments(
        **jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, arguments)
    )


def canonical_arguments(**arguments: object) -> tuple[Spec, Operands]:
    """What a backend is given for arguments of `jflash.attention`."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(jflash.attention).parameters.items()
        if name not in ("implementation", "return_residual", "residual_checkpoint_name")
    }
    spec, operands, _ = _canonical.canonicalize(**_api._with_functions_traced(defaults | arguments))
    return _coverage.mapped(spec, operands)


def run(
    call: Call,
    processors: int = 132,
    *,
    family: Family = HOPPER,
    detect_races: bool = True,
    undifferentiated: Sequence[str] = (),
    **options: object,
) -> Results:
    """A family's results for a call, in its own shapes, as on a device with this number of
    processors; without cotangents the forward's alone, without gradients of what is `undifferentiated`.

    Races are found between the warpgroups of a block. Where blocks add to the same numbers, or wait for each other, the
    interpreter would report a race too: it has no atomic additions, and runs one block after the other.
    """
    ops, kernels = family.interpreter(plgpu.InterpretGPUParams(detect_races=detect_races)), family.call
    spec, operands = canonical(call, **options)
    spec = dataclasses.replace(spec, undifferentiated=frozenset(undifferentiated))
    reason = family.unsupported(spec)
    assert reason is None, reason
    forward, backward = family.plans(spec, processors)
    # Jitted, as each operation around the kernels would be compiled on its own.
    out, lse = jax.block_until_ready(jax.jit(lambda operands: kernels.forward(forward, operands, ops))(operands))
    assert not races_found(), "forward"
    if call.d_out is None:
        return Results(
            out.reshape(call.query.shape[:-1] + out.shape[-1:]),
            lse.transpose(0, 2, 1).reshape(call.query.shape[:-1]),
            {},
        )
    pull_back = jax.jit(lambda operands, residuals: kernels.backward(backward, operands, residuals, ops))
    gradients = jax.block_until_ready(pull_back(operands, residuals(call, spec, out, lse)))
    assert not races_found(), "backward"
    return results(call, out, lse, gradients, undifferentiated)


def residuals(call: Call, spec: Spec, out: Any, lse: Any) -> Residuals:
    """What a backward is given of a call: NaN as the cotangents of a query that sees no key, which reach nothing."""
    batch = call.query.shape[:-3]
    flat = lambda array: jnp.asarray(array).reshape(spec.batch, *array.shape[len(batch) :])
    hidden = lse == -jnp.inf
    d_out = jnp.where(hidden.swapaxes(1, 2)[..., None], jnp.nan, flat(call.d_out))
    return Residuals(out, lse, d_out, jnp.where(hidden, jnp.nan, flat(call.d_lse).transpose(0, 2, 1)))


def results(call: Call, out: Any, lse: Any, gradients: Operands, undifferentiated: Sequence[str] = ()) -> Results:
    """What kernels made of a call, in its own shapes."""
    asked = {name: array for name, array in oracle.split(call)[0].items() if name not in undifferentiated}
    return Results(
        out.reshape(*call.query.shape[:-3], *out.shape[1:]),
        lse.transpose(0, 2, 1).reshape(call.d_lse.shape),
        {name: shaped_as(getattr(gradients, name), array) for name, array in asked.items()},
    )


def shaped_as(arrays: Any, like: Any) -> Any:
    """An array, or all of several that there are, in the shapes of others."""
    leaves, tree = jax.tree.flatten(like)
    given = zip(jax.tree.leaves(arrays), leaves, strict=True)
    return tree.unflatten([array.reshape(like.shape) for array, like in given])


def smooth(arrays: Any) -> Any:
    """Without those of a score_mod's arrays that have no derivative."""
    return jax.tree.map(lambda array: array if jnp.issubdtype(array.dtype, jnp.inexact) else None, arrays)


def run_tangents(call: Call, along: dict[str, Any], *, partial: bool = False, **options: object) -> Tangents:
    """The kernels' tangents for a call, along those of some operands, in its own shapes."""
    ops, kernels = HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True)), HOPPER.call
    spec, operands = canonical(call, **options)
    spec = dataclasses.replace(spec, partial=partial)
    assert mosaic_gpu.unsupported_call(spec) is None
    assert mosaic_gpu.unsupported_tangent(spec) is None
    forward, tangent = plan.plan_forward(spec, 132), plan.plan_tangent(spec, frozenset(along), 132)
    # A tangent has its operand's shape.
    shaped = {
        name: shaped_as(jax.tree.map(jnp.asarray, t), smooth(getattr(operands, name))) for name, t in along.items()
    }
    nothing = jax.tree.map(lambda _: None, operands)

    def run(operands: Operands, tangents: Operands) -> tuple[semantics.Results, semantics.Results]:
        results = semantics.Results(*kernels.forward(forward, operands, ops))
        return results, kernels.tangent(tangent, operands, results, tangents, ops)

    results, moved = jax.block_until_ready(jax.jit(run)(operands, nothing._replace(**shaped)))
    assert not races_found()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), results) == jax.tree.map(lambda x: (x.shape, x.dtype), moved)
    batch, rows = call.query.shape[:-3], call.query.shape[:-1]
    return Tangents(moved.out.reshape(*batch, *moved.out.shape[1:]), moved.lse.transpose(0, 2, 1).reshape(rows))


def assert_tangents_right(call: Call, along: dict[str, Any], **options: object) -> None:
    """In each precision in which the kernels take the call, as for `assert_right`."""
    if call.query.dtype != np.float32:
        oracle.assert_tangents_right(run_tangents(call, along, **options), call, along)
        return
    for precision in ({}, dict(precision="highest")):
        spec, _ = canonical(call, **options, **precision)
        reason = mosaic_gpu.unsupported_call(spec) or mosaic_gpu.unsupported_tangent(spec)
        if reason is not None and not precision:
            raise unittest.SkipTest(f"mosaic_gpu: {reason}")
        if reason is None:
            got = run_tangents(call, along, **options, **precision)
            oracle.assert_tangents_right(got, call, along, as_tf32=not precision)


def assert_right(attend: Callable[..., Results], call: Call, family: Family = HOPPER) -> None:
    """A call is right in each precision in which a family takes it, which is an option of `attend`.

    float32 has its own rule with six products of pieces for one, and that of TF32 with three.
    """
    if call.query.dtype != np.float32:
        oracle.assert_right(attend(), call)
        return
    both = ({}, dict(precision="highest"))
    reasons = [family.unsupported(canonical(call, **options)[0]) for options in both]
    if None not in reasons:
        raise unittest.SkipTest(f"{family.backend.__name__.split('.')[-1]}: {reasons[0]}")
    for options, reason in zip(both, reasons, strict=True):
        if reason is None:
            oracle.assert_right(attend(**options), call, as_tf32=not options)


def functions(processors: int = 132, *, family: Family = HOPPER) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A family's forward and backward, jitted, as on a device with this number of processors; each finds races."""
    ops, kernels = family.interpreter(plgpu.InterpretGPUParams(detect_races=True)), family.call

    def forward(spec: Spec, operands: Operands) -> Any:
        return kernels.forward(family.plans(spec, processors)[0], operands, ops)

    def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
        return kernels.backward(family.plans(spec, processors)[1], operands, residuals, ops)

    def without_races(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnums=0)

        def run(*args: Any) -> Any:
            results = jax.block_until_ready(jitted(*args))
            assert not races_found(), function.__name__
            return results

        return run

    return without_races(forward), without_races(backward)


def traced(
    call: Call, sharding: jax.sharding.Sharding | None = None, *, family: Family = HOPPER, **options: object
) -> tuple[jax.core.ClosedJaxpr, jax.core.ClosedJaxpr]:
    """A call's forward and backward as on the hardware, not compiled; of arrays with a sharding."""
    spec, operands = canonical(call, **options)
    operands = jax.device_put(operands, sharding)
    (forward, backward), kernels = family.plans(spec, 132), family.call
    trace = jax.make_jaxpr(lambda operands: kernels.forward(forward, operands, family.ops), return_shape=True)
    traced_forward, (out, lse) = trace(operands)
    residuals = Residuals(out, lse, out, lse)
    pull_back = lambda *args: kernels.backward(backward, *args, family.ops)
    return traced_forward, jax.make_jaxpr(pull_back)(operands, residuals)


def traced_tangent(
    call: Call, sharding: jax.sharding.Sharding | None = None, **options: object
) -> jax.core.ClosedJaxpr:
    """Trace a call's tangent, along all that may move."""
    spec, operands = canonical(call, **options)
    operands = jax.device_put(operands, sharding)
    moving = tangent_kernel.MOVING & spec.operands
    tangents = Operands(**{name: array if name in moving else None for name, array in operands._asdict().items()})
    kernels, ops = HOPPER.call, HOPPER.ops
    results = jax.eval_shape(lambda operands: kernels.forward(plan.plan_forward(spec, 132), operands, ops), operands)
    results = jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), semantics.Results(*results))
    tangent = lambda *args: kernels.tangent(plan.plan_tangent(spec, moving, 132), *args, ops)
    return jax.make_jaxpr(tangent)(operands, jax.device_put(results, sharding), tangents)


def races_found() -> bool:
    """Whether the last kernel run had races. There is no public way to ask."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call.get_races().races_found
