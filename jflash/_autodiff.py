"""What JAX's transforms make of one call to a backend: derivatives, `vmap`, and more than one device.

From the outside in: `custom_vjp` (reverse mode), `custom_vmap` (a mapped axis becomes part of the batch, so that a
kernel never sees it), the sharding rule (`_sharding`), the backend of each platform (`_lowering`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from jflash import _lowering, _sharding
from jflash._dispatch import Choice
from jflash._semantics.spec import Operands, Residuals, Spec


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(choice: Choice, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of the chosen backends, with every transform that they have."""
    operands = _lowering.refuse_unserved(choice, operands)
    if choice.differentiated_by_jax:
        return _lowering.forward(choice, spec, operands)

    def forward(operands: Operands) -> tuple[Array, Array]:
        return _lowering.forward(choice, spec.resized(operands), operands)

    shard = functools.partial(_sharding.shard, key_heads=spec.key_heads, group=spec.group)

    def differentiated(undifferentiated: frozenset[str]) -> Callable[[Operands, Residuals], Operands]:
        def backward(operands: Operands, residuals: Residuals, choice: Choice = choice) -> Operands:
            own = dataclasses.replace(spec.resized(operands), undifferentiated=undifferentiated)
            return _lowering.backward(choice, own, operands, residuals)

        plain = choice.twice_differentiable
        if plain is None:
            return _refuse_derivative(choice.names, _batched(shard(backward), gradients=True))
        return _reverse_differentiable(functools.partial(backward, choice=plain), shard(backward))

    call = jax.custom_vjp(_batched(shard(forward), gradients=False))

    def save(primals: Any) -> Any:
        operands = jax.tree.map(lambda primal: primal.value, primals)
        undifferentiated = frozenset(
            name
            for name, value in primals._asdict().items()
            if not any(primal.perturbed for primal in jax.tree.leaves(value))
        )
        out, lse = call(operands)
        return (out, lse), (operands, out, lse, _as_shape(undifferentiated))

    def pull_back(saved: Any, cotangents: Any) -> tuple[Operands]:
        operands, out, lse, undifferentiated = saved
        cotangents = jax.tree.map(_materialized, cotangents)
        return (differentiated(_from_shape(undifferentiated))(operands, Residuals(out, lse, *cotangents)),)

    call.defvjp(save, pull_back, symbolic_zeros=True)
    return call(_sharding.varying_alike(operands, like=operands))


def _as_shape(undifferentiated: frozenset[str]) -> Array:
    """Names of operands as the shape of an empty array: what the forward tells the backward at trace time.

    Not as a static node of what the forward saves. JAX keeps one trace of the forward for each set of operands that
    is differentiated, but takes the structure of what is saved from the latest: it has to be the same for all.
    """
    bits = sum(1 << index for index, name in enumerate(Operands._fields) if name in undifferentiated)
    return jnp.zeros((0, bits), jnp.bool_)


def _from_shape(array: Array) -> frozenset[str]:
    bits = array.shape[1]
    return frozenset(name for index, name in enumerate(Operands._fields) if bits >> index & 1)


def _materialized(cotangent: Any) -> Array:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zeros: Any = cotangent
    return jnp.zeros(zeros.shape, zeros.dtype)


@contextlib.contextmanager
def forward_mode_named(names: str) -> Generator[None]:
    """Adds to JAX's refusal of forward mode what to do about it."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" in str(error):
            error.add_note(
                f"jflash's {names} implementation has reverse-mode derivatives only. "
                "For jax.jvp, jax.jacfwd and jax.hessian use jflash.attention(..., implementation='reference')."
            )
        raise


def _reverse_differentiable(function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, with a reverse-mode derivative of every order.

    `function` is the same in plain JAX. Its vjp is again a function of arrays whose first axis is the batch, so it
    gets the same treatment, and so on as far as anyone asks.
    """
    call = jax.custom_vjp(_batched(compiled, gradients=True))

    def pull_back(args: tuple[Any, ...], cotangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def vjp(leaves: list[Array], cotangents: Any) -> list[Array]:
            def of_smooth(some: list[Array]) -> Any:
                remaining = iter(some)
                merged = [next(remaining) if s else leaf for s, leaf in zip(smooth, leaves, strict=True)]
                return function(*jax.tree.unflatten(tree, merged))

            return jax.vjp(of_smooth, [leaf for s, leaf in zip(smooth, leaves, strict=True) if s])[1](cotangents)[0]

        gradients = iter(_reverse_differentiable(vjp, vjp)(leaves, cotangents))
        return jax.tree.unflatten(tree, [next(gradients) if s else None for s in smooth])

    call.defvjp(lambda *args: (call(*args), args), pull_back)
    return call


def _refuse_derivative(names: str, function: Callable[..., Any]) -> Callable[..., Any]:
    call = jax.custom_vjp(function)

    def pull_back(saved: None, cotangents: Any) -> Any:
        raise NotImplementedError(
            f"The gradient of {names} has no derivative of its own. For second derivatives use "
            "jflash.attention(..., implementation='xla') or 'reference'."
        )

    call.defvjp(lambda *args: (call(*args), None), pull_back)
    return call


def _batched(function: Callable[..., Any], *, gradients: bool) -> Callable[..., Any]:
    """`function` of arrays `[#B, ...]`, with `vmap` done by folding the mapped axis into B.

    Arrays that the batch shares (leading size 1) stay shared, unless `gradients`: then the result for a shared array is
    a sum over the batch, which must be one sum for each entry of the mapped axis, so those arrays are spread first.
    """
    call = custom_vmap(function)

    @call.def_vmap
    def _(axis_size: int, in_batched: Any, *args: Any) -> Any:
        paths, tree = jax.tree.flatten_with_path(args)
        mapped = jax.tree.leaves(in_batched)
        single = [jax.ShapeDtypeStruct(x.shape[m:], x.dtype) for (_, x), m in zip(paths, mapped, strict=True)]
        results = jax.eval_shape(function, *jax.tree.unflatten(tree, single))
        every = jax.tree.map(lambda _: True, results)
        if axis_size == 0:
            return jax.tree.map(lambda result: jnp.zeros((0, *result.shape), result.dtype), results), every
        batch = max(x.shape[0] for x in single)

        def fold(path: Any, array: Array, mapped: bool) -> Array:
            smooth = jnp.issubdtype(array.dtype, jnp.inexact)
            whole = getattr(path[-1], "name", "") in ("query", "key", "value") or (gradients and smooth)
            if not mapped and not whole and array.shape[0] == 1:
                return array
            rest = array.shape[mapped + 1 :]
            spread = array if mapped else array[None]
            return jnp.broadcast_to(spread, (axis_size, batch, *rest)).reshape(axis_size * batch, *rest)

        folded = [fold(path, x, m) for (path, x), m in zip(paths, mapped, strict=True)]
        out = _batched(function, gradients=gradients)(*jax.tree.unflatten(tree, folded))

        def unfold(array: Array, result: jax.ShapeDtypeStruct) -> Array:
            array = array.reshape(axis_size, batch, *array.shape[1:])
            if result.shape[0] == 1 and batch > 1:
                array = array.astype(jnp.promote_types(array.dtype, jnp.float32)).sum(axis=1, keepdims=True)
            return array.astype(result.dtype)

        return jax.tree.map(unfold, out, results), every

    return call
