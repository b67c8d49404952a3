"""The one JAX primitive of jflash, and the operations that it performs.

An operation is a function of arrays that JAX's transforms meet whole, and whose derivatives are operations again.
`jax.custom_vjp` would not do, as it has no forward mode. Nor would `jax.custom_jvp`: JAX has to transpose its tangent
step by step, which is impossible for a kernel or a loop over visible tiles. An operation defines its tangent itself,
and a linear one its transpose, so both modes work, in any order and nesting.

An operation's arguments and results are trees of arrays whose first axis is the batch: of size B, or 1 where the batch
shares the array. A `vmap` axis is folded into it, so that a kernel never sees one.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jflash._choice import Choice, Program
from jflash._mesh import in_mesh, varying_alike
from jflash._platform import lowering_targets
from jflash._semantics import tokens
from jflash._semantics.dtypes import widened

OWN = frozenset({"query", "key", "value", "out", "lse", "d_out", "d_lse"})
"""The fields of operands, results and residuals of which each entry of the batch has an array of its own."""


class Operation(Protocol):
    """A description of what is computed: hashable, and equal when the same code serves."""

    @property
    def choice(self) -> Choice | None:
        """The backends that compute the operation, each on its own platforms; `None`: one code is for all platforms."""
        ...

    @property
    def sums(self) -> bool:
        """Whether a result for an array that the batch shares is a sum over the batch."""
        ...

    @property
    def own(self) -> Collection[str]:
        """The names of the arguments' fields that the entries of the batch never share; `OWN` but for a paged cache."""
        ...

    @property
    def tokens(self) -> int | None:
        """The rows of the one array in which all entries of the batch have their queries; `None` if each has its
        own."""
        ...

    def form_if_untraced(self, args: Any) -> Any:
        """Return the results' form, as arrays or shapes, if no program is traced before it is lowered; else `None`."""
        ...

    def __call__(self, program: Program | None, args: Any) -> Any:
        """Return the results where `program` serves, in one form for all programs; JAX never differentiates it."""
        ...

    def tangents(self, args: Any, results: Any, tangents: Any) -> Any:
        """Return the results' tangents, made of operations; `None` stands for a tangent of 0, given or returned."""
        ...

    def transpose(self, args: Any, cotangents: Any) -> Any:
        """Return the cotangents of linear arguments, which come as a `jax.ShapeDtypeStruct`, and `None` for others.

        Among the results' `cotangents`, a `jax.ShapeDtypeStruct` stands for zeros (`with_zeros`).
        """
        ...


def perform(operation: Operation, *args: Any) -> Any:
    """Return the operation's results, under every transform."""
    leaves, tree = jax.tree.flatten(varying_alike(args, like=args))
    programs = (None,) if operation.choice is None else operation.choice.programs
    # A program for other platforms is traced when it is lowered, if ever. But a mesh is known only here.
    form = None
    if not in_mesh(leaves):
        form = operation.form_if_untraced(args)
        programs = programs[: form is None]
    traced = [_trace(leaves, operation, program, tree) for program in programs]
    jaxprs = tuple(jaxpr for jaxpr, _ in traced)
    results = [result for _, result in traced] or [form]
    forms = [jax.tree.map(lambda array: (array.shape, array.dtype), result) for result in results]
    assert all(form == forms[0] for form in forms), forms
    shapes, result_tree = jax.tree.flatten(results[0])
    types = tuple(jaxprs[0].out_avals if jaxprs else map(jax.typeof, shapes))
    untraced = () if jaxprs else (_partitioned(),)
    params = dict(
        operation=operation, tree=tree, result_tree=result_tree, types=types, jaxprs=jaxprs, untraced=untraced
    )
    return result_tree.unflatten(_primitive.bind(*leaves, **params))


@functools.cache
def _partitioned() -> ClosedJaxpr:
    """Return a program that is partitioned: what an operation without a traced program has among its parameters.

    JAX gives a lowering the devices only where it finds a program that wants them, as the untraced one will.
    """
    same = custom_partitioning(lambda array: array)
    of_args = lambda mesh, args, result: (mesh, lambda array: array, result.sharding, tuple(a.sharding for a in args))
    same.def_partition(of_args, sharding_rule="... -> ...")
    return jax.make_jaxpr(same)(jax.ShapeDtypeStruct((), jnp.float32))


def tangents_of(function: Callable[..., Any], args: Any, tangents: Any) -> Any:
    """Return `jax.jvp`'s tangents of `function(*args)`, where `None` stands for a given tangent of 0."""
    leaves, tree = jax.tree.flatten(args)
    given = tree.flatten_up_to(tangents)

    def of_moving(moving: list[Array]) -> Any:
        return function(*tree.unflatten(_merged(leaves, moving, [tangent is not None for tangent in given])))

    moving = [(leaf, tangent) for leaf, tangent in zip(leaves, given, strict=True) if tangent is not None]
    primals, pushed = ([pair[index] for pair in moving] for index in (0, 1))
    return jax.jvp(of_moving, (primals,), (pushed,))[1]


def is_zero(cotangent: Any) -> bool:
    """Say whether a cotangent that `Operation.transpose` is given is known to be 0."""
    return isinstance(cotangent, jax.ShapeDtypeStruct)


def with_zeros[Tree](cotangents: Tree) -> Tree:
    """Return the cotangents that `Operation.transpose` is given, all of them as arrays."""
    array = lambda cotangent: jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero(cotangent) else cotangent
    return jax.tree.map(array, cotangents)


def _merged(leaves: Sequence[Any], some: Sequence[Any], taken: Sequence[bool]) -> list[Any]:
    """Return `leaves`, with those that are `taken` replaced by `some` in turn."""
    remaining = iter(some)
    return [next(remaining) if t else leaf for leaf, t in zip(leaves, taken, strict=True)]


def _trace(leaves: list[Array], operation: Operation, program: Program | None, tree: Any) -> tuple[ClosedJaxpr, Any]:
    run = functools.partial(_run, operation=operation, program=program, tree=tree)
    with jax.disable_jit(False):
        return jax.make_jaxpr(run, return_shape=True)(*leaves)


@functools.partial(jax.jit, static_argnames=("operation", "program", "tree"))
def _run(*leaves: Array, operation: Operation, program: Program | None, tree: Any) -> Any:
    """Run the operation; JAX traces this once for each kind of call."""
    return varying_alike(operation(program, tree.unflatten(leaves)), like=leaves)


def _lower(
    ctx: mlir.LoweringRuleContext,
    *leaves: Any,
    operation: Operation,
    tree: Any,
    jaxprs: Sequence[ClosedJaxpr],
    **_: Any,
) -> Any:
    """Lower the program of the platform that the call is lowered for.

    `jax.lax.platform_dependent` cannot do that: when a call is exported for two platforms, it lowers both programs for
    both, and a kernel can be lowered for its own platform only.
    """
    platform = (ctx.platforms or ctx.module_context.platforms)[0]
    choice = operation.choice
    index = 0 if choice is None else choice.serving(platform)
    if index < len(jaxprs):
        function: Callable[..., Any] = jaxpr_as_fun(jaxprs[index])
    else:
        function = _serving(operation, platform, tree)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)


def _serving(operation: Operation, platform: str, tree: Any) -> Callable[..., list[Array]]:
    """What serves on a platform, by JAX's name for lowering: of leaves, and not traced yet."""
    choice = operation.choice
    program = None if choice is None else choice.programs[choice.serving(platform)]
    run = functools.partial(_run, operation=operation, program=program, tree=tree)
    return lambda *leaves: jax.tree.leaves(run(*leaves))


_computing: contextvars.ContextVar[bool] = contextvars.ContextVar("computing", default=False)


def _compute(*leaves: Any, **params: Any) -> Any:
    """Compute the results outside of any `jit`, by way of one: only a lowering knows the platform.

    Where `jax_debug_nans` or `jax_debug_infs` has found something in the results, JAX calls the compiled function again
    without compiling it, to find the step that made it, and so comes back to here: not to compile the same again.
    """
    if _computing.get():
        return _serving(params["operation"], next(iter(lowering_targets(leaves))), params["tree"])(*leaves)
    token = _computing.set(True)
    try:
        with jax.disable_jit(False):
            return _compiled(*leaves, **params)
    finally:
        _computing.reset(token)


@functools.partial(jax.jit, static_argnames=("operation", "tree", "result_tree", "types", "jaxprs", "untraced"))
def _compiled(*leaves: Array, **params: Any) -> Any:
    return _primitive.bind(*leaves, **params)


def _jvp(primals: Any, tangents: Any, *, operation: Operation, tree: Any, **_: Any) -> tuple[list[Array], list[Any]]:
    args = tree.unflatten(primals)
    made = perform(operation, *args)
    leaves, result_tree = jax.tree.flatten(made)
    given = tree.unflatten([None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents])
    found = result_tree.flatten_up_to(operation.tangents(args, made, given))
    zero = lambda like: ad.Zero(jax.typeof(like).to_tangent_aval())
    return leaves, [zero(like) if tangent is None else tangent for like, tangent in zip(leaves, found, strict=True)]


def _transpose(
    cotangents: Any, *leaves: Any, operation: Operation, tree: Any, result_tree: Any, **_: Any
) -> list[Array | None]:
    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype)

    args = tree.unflatten([shape_of(leaf) if ad.is_undefined_primal(leaf) else leaf for leaf in leaves])
    given = [shape_of(cotangent) if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents]
    return tree.flatten_up_to(operation.transpose(args, result_tree.unflatten(given)))


_WITHOUT_GRADIENT = ("mask_mod_arrays",)


def _batch(
    leaves: Any, axes: Any, *, operation: Operation, tree: Any, types: Sequence[ShapedArray], **_: Any
) -> tuple[list[Array], list[int]]:
    """Make a mapped axis part of the batch.

    Arrays that the batch shares (leading size 1) stay shared, unless the operation sums: then there must be one sum for
    each entry of the mapped axis, so those arrays are spread first. An array is also spread where its tangent is.
    """
    arrays = [leaf if axis is None else jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)]
    mapped = [axis is not None for axis in axes]
    single = [jax.ShapeDtypeStruct(x.shape[m:], x.dtype) for x, m in zip(arrays, mapped, strict=True)]
    size = next(array.shape[0] for array, m in zip(arrays, mapped, strict=True) if m)
    if size == 0:
        return [jnp.zeros((0, *result.shape), result.dtype) for result in types], [0] * len(types)
    # Places are those within an argument: an operand and its tangent have the same.
    places = [path[1:] for path, _ in jax.tree.leaves_with_path(tree.unflatten(single))]
    joined = frozenset() if operation.tokens is None else tokens.JOINED
    shapes = {getattr(place[0], "name", ""): array.shape for place, array in zip(places, single, strict=True)}
    batch = max(shape[0] for name, shape in shapes.items() if name not in joined)
    spread = {place for place, m in zip(places, mapped, strict=True) if m}

    def fold(place: Any, array: Array, mapped: bool) -> Array:
        name = getattr(place[0], "name", "")
        if name in joined:
            each = jnp.broadcast_to(array if mapped else array[None], (size, *array.shape[mapped:]))
            return tokens.joined(name, each, shapes)
        is_summed = operation.sums and jnp.issubdtype(array.dtype, jnp.inexact) and name not in _WITHOUT_GRADIENT
        whole = place in spread or name in operation.own or is_summed
        if not whole and array.shape[0] == 1:
            return array
        rest = array.shape[mapped + 1 :]
        array = array if mapped else array[None]
        return jnp.broadcast_to(array, (size, batch, *rest)).reshape(size * batch, *rest)

    def unfold(array: Array, result: Any) -> Array:
        if array.size == size * math.prod(result.shape):
            return array.reshape(size, *result.shape)
        array = array.reshape(size, batch, *array.shape[1:])
        return array.astype(widened(array.dtype)).sum(axis=1, keepdims=True).astype(result.dtype)

    folded = perform(operation, *tree.unflatten(map(fold, places, arrays, mapped)))
    return list(map(unfold, jax.tree.leaves(folded), types)), [0] * len(types)


_primitive = Primitive("jflash")
_primitive.multiple_results = True
_primitive.def_impl(_compute)
_primitive.def_abstract_eval(lambda *_, types, **others: list(types))
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower)
for _name in ("cpu", "cuda", "rocm", "tpu"):
    # Each platform has a rule of its own: where a program is exported for several, JAX asks for each in turn.
    mlir.register_lowering(_primitive, functools.partial(_lower), platform=_name)
