"""One call to a backend under JAX's transforms: derivatives of every order and mode, `vmap`, more than one device.

Attention has a tangent, linear in the operands' tangents. The transpose of the tangent is the backward, and the
transpose of the backward is the tangent. A backend that has its own forward, tangent or backward uses it. What it lacks
is `xla`'s, in plain JAX; so are the derivatives of tangent and backward with respect to the arguments in which they are
not linear.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jflash import (
    _dispatch,
    _mesh,
    _platform,
    _primitive,
    _redistribute,
    _ring,
    _sequence,
    _sequence_strategy,
    _sharding,
)
from jflash._choice import Choice
from jflash._dispatch import Functions
from jflash._ring import SequenceSplit
from jflash._semantics import bias_of_queries
from jflash._semantics.spec import Operands, Residuals, Results, Spec

RESIDUAL_CHECKPOINT_NAMES = ("jflash_out", "jflash_lse")
"""What policies of `jax.checkpoint` call the output and the log-sum-exp of calls that give no names of their own."""


def checkpoint_names(value: Any) -> tuple[str, str]:
    """Return the names of output and log-sum-exp that `residual_checkpoint_name` gives."""
    names: Sequence[Any] = (value, value) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "`residual_checkpoint_name` must be a name, or a pair of names, of the output and the log-sum-exp. "
            f"Got {value!r}."
        )
    return names[0], names[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def attend(choice: Choice, spec: Spec, operands: Operands, names: tuple[str, str]) -> tuple[Array, Array]:
    """Return (out, lse) of the chosen backends, under every transform; `names` are theirs for `jax.checkpoint`."""
    sequence = _ring.in_shard_map(spec)
    if sequence is not None:
        operands = _mesh.varying_over(operands, spec.sequence_axes)
        strategy, _ = _sequence_strategy.choose(sequence, spec.heads, spec.key_heads)
        if strategy != "ring":
            redistribute = _redistribute.all_to_all if strategy == "all_to_all" else _redistribute.gather
            local = lambda spec, operands: attend(choice, spec, operands, names)
            return redistribute(local, sequence, operands)
    first, *others = choice.programs
    backend = _dispatch.BACKENDS[first.backend]
    by_jax = getattr(backend, "DIFFERENTIATED_BY_JAX", False) and spec.pages is None
    if not others and sequence is None and by_jax:
        with _platform.lowered_for(first.platform):
            return _named(Results(*backend.forward(spec, operands)), names)
    return _attention(_Devices(choice), spec, operands, names)


def _attention(where: _Devices | _OneDevice, spec: Spec, operands: Operands, names: tuple[str, str]) -> Results:
    """Return out and lse, named where the forward ends and the derivatives begin.

    So `jax.checkpoint` can keep them, and if it does, nothing that the backward reads needs the forward again.
    """
    results = _named(_primitive.perform(_Attention(where, spec), operands), names)
    return _primitive.perform(_Differentiable(where, spec), operands, results)


def _named(results: Results, names: tuple[str, str]) -> Results:
    return Results(*map(checkpoint_name, results, names))


@dataclasses.dataclass(frozen=True)
class _Devices:
    """The place of a user's call: all of its devices."""

    choice: Choice

    def run(self, part: _Part, program: Any, args: Any) -> Any:
        """Run one of the three functions, over however many devices there are."""

        def local(sequence: SequenceSplit | None, *args: Any) -> Any:
            name = program.backend
            if sequence is not None:
                name = _dispatch.serving_split(program, part.spec, self.choice.names)
            with _platform.lowered_for(program.platform):
                found = part.of(_dispatch.functions(name, part.spec), sequence, *args)
            # A loop keeps what its steps give in arrays of all steps. On a GPU, XLA has a kernel write there at once
            # (its dynamic slice fusion), and where something else reads the result too, runs it a second time.
            return found if name == "xla" else lax.optimization_barrier(found)

        return _sharding.shard(local, part.spec, part.like(args[0]))(*args)


@dataclasses.dataclass(frozen=True)
class _OneDevice:
    """The place of a part of a call whose sequences are split: one device."""

    backend: Functions
    choice: ClassVar[None] = None

    def run(self, part: _Part, program: None, args: Any) -> Any:
        """Run one of the three functions on this device."""
        return part.of(self.backend, None, *args)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One of a backend's three functions: forward, tangent or backward."""

    where: _Devices | _OneDevice
    spec: Spec
    sums = False

    kind: ClassVar[str]
    """The function's name."""

    @property
    def choice(self) -> Choice | None:
        """The backends that compute the function."""
        return self.where.choice

    @property
    def own(self) -> frozenset[str]:
        """The operands that the batch never shares: of a paged call neither keys nor values."""
        return _primitive.OWN if self.spec.pages is None else _primitive.OWN - {"key", "value"}

    @property
    def tokens(self) -> int | None:
        """The rows of the one array in which all entries have their queries, if there is one."""
        return self.spec.tokens

    def __call__(self, program: Any, args: Any) -> Any:
        return self.where.run(self, program, args)

    def of(self, backend: Functions, sequence: SequenceSplit | None, operands: Operands, *others: Any) -> Any:
        """Return a backend's results for one device's part, in the one form of all backends."""
        spec = self.spec.resized(operands)
        if sequence is None:
            return self._in_full(operands, getattr(backend, self.kind)(spec, operands, *others))
        return self._in_full(operands, self._split(backend, sequence, operands, *others))

    def _by_xla(self, *args: Any) -> Any:
        """Return the results in plain JAX, for its derivatives."""
        spec = self.spec.resized(args[0])
        return self.of(_dispatch.functions("xla", spec), _ring.in_shard_map(spec), *args)

    def _split(self, backend: Functions, sequence: SequenceSplit, operands: Operands, *others: Any) -> Any:
        """Return the results where sequences are split."""
        raise NotImplementedError

    def form_if_untraced(self, args: Any) -> Any:
        """Return `None`: this is computed whenever it is made."""
        del args
        return None

    def like(self, operands: Operands) -> Any:
        """Return arrays or shapes with the form of the results."""
        spec = self.spec.resized(operands)
        form: Any = Results
        rows = (spec.batch, spec.query_length) if spec.tokens is None else (1, spec.tokens)
        return form(
            jax.ShapeDtypeStruct((*rows, spec.heads, spec.value_dim), spec.dtype),
            jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.query_length), spec.accumulator),
        )

    def _in_full(self, operands: Operands, results: Any) -> Any:
        """Return the results in the one form of all backends."""
        del operands
        return Results(*results)


class _Attention(_Part):
    """The forward: operands -> out, lse."""

    kind = "forward"

    def _split(self, backend: Functions, sequence: SequenceSplit, operands: Operands, *others: Any) -> Any:
        return _sequence.forward(backend, sequence, operands)

    def tangents(self, args: Any, results: Results, tangents: Any) -> Results:
        """Return none: they are `_Differentiable`'s."""
        return _nothing(results)

    def transpose(self, args: Any, cotangents: Any) -> Any:
        raise AssertionError("Attention is not linear.")


class _Differentiable(_Part):
    """The operation that gives out and lse of some operands back, as functions of the operands."""

    @property
    def choice(self) -> None:
        """No backend: there is nothing to compute."""
        return

    def __call__(self, program: Any, args: Any) -> Results:
        _, results = args
        return results

    def tangents(self, args: Any, results: Results, tangents: Any) -> Results:
        if self.spec.pages is not None:
            raise NotImplementedError(
                "A call with `page_table` has no derivative. For one, gather the keys and values, and leave out "
                "`page_table`: key[page_table].reshape(*B, pages * page_size, K, H)."
            )
        (operands, _), (pushed, _) = args, tangents
        return _primitive.perform(_Tangent(self.where, self.spec), operands, results, pushed)

    def transpose(self, args: Any, cotangents: Any) -> Any:
        raise AssertionError("Attention is not linear.")


class _Tangent(_Part):
    """The tangent: operands, out and lse, tangents of operands (`None`: 0) -> tangents of out and lse."""

    kind = "tangent"

    def form_if_untraced(self, args: Any) -> Results:
        """Return the form: reverse mode makes a tangent only to transpose it, and asks for no program."""
        return self.like(args[0])

    def _split(self, backend: Functions, sequence: SequenceSplit, operands: Operands, *others: Any) -> Any:
        _, tangents = others
        attend = lambda spec, part: _attention(_OneDevice(backend), spec, part, RESIDUAL_CHECKPOINT_NAMES)
        return _sequence.tangent(attend, sequence, operands, tangents)

    def tangents(self, args: Any, results: Results, tangents: Any) -> Results:
        *point, pushed = args
        *moved, linear = tangents
        found = _primitive.perform(self, *point, linear) if jax.tree.leaves(linear) else None

        def function(operands: Operands, results: Results) -> Results:
            return self._by_xla(operands, results, pushed)

        return _with_rest(found, function, point, moved)

    def transpose(self, args: Any, cotangents: Results) -> Any:
        operands, results, pushed = args
        asked = [name for name, value in pushed._asdict().items() if any(map(_is_linear, jax.tree.leaves(value)))]
        spec = dataclasses.replace(
            self.spec,
            undifferentiated=self.spec.operands.difference(asked),
            lse_has_cotangent=not _primitive.is_zero(cotangents.lse),
        )
        residuals = Residuals(results.out, results.lse, *_primitive.with_zeros(cotangents))
        gradients = _primitive.perform(_Backward(self.where, spec), operands, residuals)
        return _nothing(operands), _nothing(results), _where_linear(pushed, gradients)


class _Backward(_Part):
    """The backward: operands; out, lse and their cotangents -> gradients of operands, `None` for ones not asked for."""

    kind = "backward"
    sums = True

    def of(self, backend: Functions, sequence: SequenceSplit | None, operands: Operands, *others: Any) -> Any:
        spec = self.spec.resized(operands)
        if not bias_of_queries.has_closed_form(spec):
            return super().of(backend, sequence, operands, *others)
        rest = _Backward(self.where, dataclasses.replace(spec, undifferentiated=spec.undifferentiated | {"bias"}))
        # Devices that have the same queries, and other keys, would each count them.
        counted = sequence is None or sequence.ring or sequence.keys.own == 0
        (residuals,) = others
        bias = bias_of_queries.gradient(spec, operands, residuals, counted)
        return rest.of(backend, sequence, operands, residuals)._replace(bias=bias)

    def _split(self, backend: Functions, sequence: SequenceSplit, operands: Operands, *others: Any) -> Any:
        return _sequence.backward(backend, sequence, operands, *others)

    def like(self, operands: Operands) -> Operands:
        unasked = {name: jax.tree.map(lambda _: None, getattr(operands, name)) for name in self.spec.undifferentiated}
        smooth = lambda array: array if jnp.issubdtype(array.dtype, jnp.inexact) else None
        return jax.tree.map(smooth, operands._replace(**unasked))

    def _in_full(self, operands: Operands, results: Operands) -> Operands:
        """Return the gradients in the one form of all backends.

        A backend may leave out a gradient that is zero, or give one that was not asked for.
        """

        def full(like: Array | None, gradient: Array | None) -> Array | None:
            if like is None:
                return None
            return jnp.zeros_like(like) if gradient is None else gradient

        arrays = results.score_mod_arrays or (None,) * len(operands.score_mod_arrays)
        results = results._replace(score_mod_arrays=arrays, mask_mod_arrays=(None,) * len(operands.mask_mod_arrays))
        return jax.tree.map(full, self.like(operands), results, is_leaf=_is_none)

    def tangents(self, args: Any, results: Operands, tangents: Any) -> Operands:
        (operands, residuals), (moved, around) = args, tangents
        found = None
        if around.d_out is not None or around.d_lse is not None:
            linear = jax.tree.map(
                lambda x, t: jnp.zeros_like(x) if t is None else t, residuals, around, is_leaf=_is_none
            )
            linear = residuals._replace(d_out=linear.d_out, d_lse=linear.d_lse)
            spec = dataclasses.replace(self.spec, lse_has_cotangent=around.d_lse is not None)
            found = _primitive.perform(_Backward(self.where, spec), operands, linear)

        return _with_rest(found, self._by_xla, args, (moved, around._replace(d_out=None, d_lse=None)))

    def transpose(self, args: Any, cotangents: Operands) -> Any:
        operands, residuals = args
        spec = dataclasses.replace(self.spec, undifferentiated=frozenset[str]())
        results = Results(residuals.out, residuals.lse)
        moving = jax.tree.map(lambda cotangent: None if _primitive.is_zero(cotangent) else cotangent, cotangents)
        pushed = _primitive.perform(_Tangent(self.where, spec), operands, results, moving)
        return _nothing(operands), _where_linear(residuals, residuals._replace(d_out=pushed.out, d_lse=pushed.lse))


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _nothing(tree: Any) -> Any:
    """Return the tree with `None` for every array."""
    return jax.tree.map(lambda _: None, tree)


def _is_linear(arg: Any) -> bool:
    return isinstance(arg, jax.ShapeDtypeStruct)


def _where_linear(args: Any, found: Any) -> Any:
    """Return `found` in the dtype of those of `args` that `Operation.transpose` asks for, `None` for others."""
    take = lambda arg, found: found.astype(arg.dtype) if _is_linear(arg) else None
    return jax.tree.map(take, args, found, is_leaf=_is_none)


def _with_rest(found: Any, function: Callable[..., Any], args: Any, tangents: Any) -> Any:
    """Return `found`, plus the tangents of `function` where its `args` move too."""
    if not jax.tree.leaves(tangents):
        return found
    rest = _primitive.tangents_of(function, tuple(args), tuple(tangents))
    return rest if found is None else jax.tree.map(jnp.add, found, rest)
