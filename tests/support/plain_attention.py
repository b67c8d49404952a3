"""Plain attention in NumPy at any precision, both modes of its derivative by hand, with every argument of
`jflash.attention`.

Independent of jflash: the only JAX in it is the derivative of a `score_mod`, which is the caller's own function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of `jflash.attention`, its arguments by their own names and shapes, in NumPy.

    `score_mod` takes `score_mod_arrays` and returns the function of one logit. `mask_mod` is the function itself.
    `keep` is the dropout mask, `[*B, N, T, S]`. `d_out` and `d_lse` are the cotangents of both results.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    scale: float | np.ndarray | None = None
    is_causal: bool = False
    query_seq_lengths: np.ndarray | None = None
    key_value_seq_lengths: np.ndarray | None = None
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: np.ndarray | None = None
    score_mod: Callable[..., Callable[..., Any]] | None = None
    score_mod_arrays: tuple[np.ndarray, ...] = ()
    mask_mod: Callable[..., Any] | None = None
    query_offset: int | np.ndarray = 0
    segment_ids: np.ndarray | tuple[np.ndarray, np.ndarray] | None = None
    sinks: np.ndarray | None = None
    dropout_rate: float = 0.0
    dropout_key: np.ndarray | None = None
    keep: np.ndarray | None = None
    d_out: np.ndarray | None = None
    d_lse: np.ndarray | None = None


class Results(NamedTuple):
    """The results of one call: out `[*B, T, N, D]`, LSE `[*B, T, N]`, and the gradients by the arguments' names."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, Any]


class Tangents(NamedTuple):
    """The tangents of one call's results, from those of its operands."""

    out: np.ndarray
    lse: np.ndarray


class Precision(NamedTuple):
    accumulator: np.dtype
    """The dtype of logits, softmax and sums."""
    storage: np.dtype | None = None
    """The dtype in which `jax.nn` keeps the probabilities and their cotangent, the call's; None: they are not
    rounded."""

    operand_bits: int | None = None
    """Bits that the operands of products are rounded to, as a matrix unit takes them. None: all."""

    def multiply(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if self.operand_bits is None:
            return left @ right
        round_ = lambda array: np.asarray(lax.reduce_precision(array, 8, self.operand_bits - 1))
        return round_(left) @ round_(right)

    def store(self, array: np.ndarray) -> np.ndarray:
        return array if self.storage is None else array.astype(self.storage).astype(self.accumulator)


class _Factors(NamedTuple):
    """The factors of every product, `[B, N, T or S, H or D]`, or their squares."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    products: np.ndarray
    scale: np.ndarray


class PlainAttention:
    """One call with its logits `[B, N, T, S]`, batch axes merged and key heads repeated."""

    def __init__(self, call: Call, precision: Precision):
        self.call, self.precision = call, precision
        *self.batch_axes, self.T, self.N, self.H = call.query.shape
        self.S, self.K, self.D = *call.key.shape[-3:-1], call.value.shape[-1]
        self.B = math.prod(self.batch_axes)
        query = self._heads_first(_zero_padding(call.query, call.query_seq_lengths))
        key, value = (
            self._heads_first(_zero_padding(array, call.key_value_seq_lengths)) for array in (call.key, call.value)
        )
        scale = np.asarray(self.H**-0.5 if call.scale is None else call.scale).astype(precision.accumulator)
        self.factors = _Factors(query, key, value, precision.multiply(query, key.swapaxes(2, 3)), scale)
        offset = np.broadcast_to(np.asarray(call.query_offset), self.batch_axes).reshape(self.B, 1, 1, 1)
        self.index = np.arange(self.T)[:, None], np.arange(self.S)
        self.distance = self.index[1] - (self.index[0] + offset)  # of the key from the query's position
        self.visible = self._visible()
        self._softmax()

    def _heads_first(self, array: np.ndarray) -> np.ndarray:
        """[*B, T, n, H] -> [B, N, T, H], heads repeated for their group, in the accumulator's dtype."""
        array = array.astype(self.precision.accumulator).reshape(self.B, *array.shape[-3:]).swapaxes(1, 2)
        return np.repeat(array, self.N // array.shape[1], axis=1)

    def _heads_last(self, array: np.ndarray, heads: int) -> np.ndarray:
        """The mirror of `_heads_first`: sums over the query heads that share one of `heads`."""
        length, features = array.shape[2:]
        array = array.reshape(self.B, heads, self.N // heads, length, features).sum(axis=2).swapaxes(1, 2)
        return array.reshape(*self.batch_axes, length, heads, features)

    def _pairs(self, array: np.ndarray) -> np.ndarray:
        """[*#B, #N, #T, #S] -> [B, N, T, S]."""
        full = np.broadcast_to(array, (*self.batch_axes, self.N, self.T, self.S))
        return full.reshape(self.B, self.N, self.T, self.S)

    def _visible(self) -> np.ndarray:
        call, (query, key) = self.call, self.index
        visible = np.ones((self.B, 1, self.T, self.S), bool)
        if call.is_causal:
            visible = visible & (self.distance <= 0)
        if call.local_window_size is not None:
            window = call.local_window_size
            left, right = window if isinstance(window, tuple) else (window, window)
            visible = visible & (-left <= self.distance) & (self.distance <= right)
        if call.query_seq_lengths is not None:
            visible = visible & (query < call.query_seq_lengths.reshape(self.B, 1, 1, 1))
        if call.key_value_seq_lengths is not None:
            visible = visible & (key < call.key_value_seq_lengths.reshape(self.B, 1, 1, 1))
        if call.segment_ids is not None:
            ids = call.segment_ids if isinstance(call.segment_ids, tuple) else (call.segment_ids,) * 2
            queries, keys = (side.reshape(self.B, 1, side.shape[-1]) for side in ids)
            visible = visible & (queries[..., None] == keys[..., None, :])
        if call.mask is not None:
            visible = visible & self._pairs(call.mask)
        if call.mask_mod is not None:
            sizes = (self.B, self.N, self.T, self.S)
            indices = [np.arange(n, dtype=np.int32).reshape(-1, *[1] * (3 - axis)) for axis, n in enumerate(sizes)]
            # Not on a GPU, where the oracle would have its compiler in common with what is held against it.
            with jax.default_device(jax.devices("cpu")[0]):
                visible = visible & np.asarray(jax.jit(jnp.vectorize(call.mask_mod))(*indices))
        return np.broadcast_to(visible, (self.B, self.N, self.T, self.S))

    def _softmax(self) -> None:
        """Logits, probabilities and their sums; every name here is used again in the backward."""
        call, dtype = self.call, self.precision.accumulator
        logits = self.factors.products * self.factors.scale
        if call.logits_soft_cap is not None:
            self.tanh = np.tanh(logits / dtype.type(call.logits_soft_cap))
            logits = dtype.type(call.logits_soft_cap) * self.tanh
        if call.bias is not None:
            logits = logits + self._pairs(call.bias.astype(dtype))
        if call.alibi_slopes is not None:
            self.slopes = call.alibi_slopes.astype(dtype)[:, None, None]
            logits = logits - self.slopes * np.abs(self.distance).astype(dtype)
        if call.score_mod is not None:
            logits, self.pull_score_mod, self.push_score_mod = self._score_mod(np.where(self.visible, logits, 0))
        seen = self.visible & (logits > -np.inf)
        self.empty = ~seen.any(axis=-1, keepdims=True)
        self.logits = np.where(seen, logits, -np.inf).astype(dtype)
        sinks = np.full(self.N, -np.inf, dtype) if call.sinks is None else call.sinks.astype(dtype)
        self.sinks = np.where(self.empty, -np.inf, sinks[:, None, None])
        largest = np.maximum(self.logits.max(axis=-1, keepdims=True, initial=-np.inf), self.sinks)
        largest = np.where(self.empty, 0, largest)
        exponentials, sink = np.exp(self.logits - largest), np.exp(self.sinks - largest)
        total = np.where(self.empty, 1, exponentials.sum(axis=-1, keepdims=True) + sink)
        self.probabilities, self.sink_probability = exponentials / total, sink / total
        self.lse = np.where(self.empty, -np.inf, largest + np.log(total))
        self.kept = self.precision.store(self._drop(self.probabilities))

    def _drop(self, probabilities: np.ndarray) -> np.ndarray:
        if self.call.keep is None:
            return probabilities
        keep_rate = self.precision.accumulator.type(1 - self.call.dropout_rate)
        return np.where(self._pairs(self.call.keep), probabilities / keep_rate, 0)

    def _score_mod(self, logits: np.ndarray) -> tuple[np.ndarray, Callable[..., Any], Callable[..., Any]]:
        """The modified logits, pullback and pushforward, by `jax.vjp` and `jax.jvp` in the accumulator's precision."""
        dtype = self.precision.accumulator
        assert dtype != np.longdouble or np.finfo(dtype).eps == np.finfo(np.float64).eps, "JAX has no longer float."
        sizes = (self.B, self.N, self.T, self.S)
        indices = [np.arange(n, dtype=np.int32).reshape(-1, *[1] * (3 - axis)) for axis, n in enumerate(sizes)]
        arrays = tuple(array.astype(dtype) for array in self.call.score_mod_arrays)

        def modified(logits: Any, arrays: Any) -> Any:
            return jnp.vectorize(self.call.score_mod(*arrays))(logits, *indices)

        def in_precision(function: Callable[..., Any], *args: Any) -> Any:
            with jax.enable_x64(dtype != np.float32):
                return jax.tree.map(np.asarray, jax.jit(function)(*args))

        pull = jax.jit(lambda logits, arrays, cotangent: jax.vjp(modified, logits, arrays)[1](cotangent))
        push = jax.jit(lambda logits, arrays, *along: jax.jvp(modified, (logits, arrays), along)[1])
        return (
            in_precision(modified, logits, arrays),
            lambda cotangent: in_precision(pull, logits, arrays, cotangent.astype(dtype)),
            lambda *along: in_precision(push, logits, arrays, *jax.tree.map(lambda leaf: leaf.astype(dtype), along)),
        )

    def results(self, residuals: Results | None = None) -> Results:
        """Return both results and all gradients.

        With `residuals` the gradients are those of a backward that knows only these results, and computes the
        probabilities again.
        """
        multiply = self.precision.multiply
        out = self.precision.store(self._heads_last(multiply(self.kept, self.factors.value), self.N))
        lse = self._rows(self.lse)
        if self.call.d_out is None:
            return Results(out, lse, {})
        d_out, d_lse = self._cotangents()
        d_probabilities = self._drop(self.precision.store(multiply(d_out, self.factors.value.swapaxes(2, 3))))
        if residuals is None:
            probabilities, kept, sink_probability = self.probabilities, self.kept, self.sink_probability
            delta = (probabilities * d_probabilities).sum(axis=-1, keepdims=True)
        else:
            known_lse = np.where(self.empty, np.inf, self._heads_first(residuals.lse[..., None]))
            probabilities, sink_probability = np.exp(self.logits - known_lse), np.exp(self.sinks - known_lse)
            kept = self._drop(probabilities)
            delta = (self._heads_first(residuals.out) * d_out).sum(axis=-1, keepdims=True)
        d_logits = probabilities * (d_probabilities - delta + d_lse)
        d_sink = sink_probability * (d_lse - delta)
        gradients = self._gradients(self.factors, kept, np.abs(self.distance), d_logits, d_sink, d_out)
        if self.precision.storage is not None:
            argument = lambda name: jax.tree.leaves(getattr(self.call, name))[0]
            gradients = {
                name: jax.tree.map(lambda leaf, name=name: leaf.astype(argument(name).dtype), gradient)
                for name, gradient in gradients.items()
            }
        return Results(out, lse, gradients)

    def tangents(self, along: dict[str, Any]) -> Tangents:
        """Return the tangents of both results, along tangents of some arguments by their names."""
        store, multiply = self.precision.store, self.precision.multiply
        (*_, t_value), t_logits, t_lse = self._moved(along)
        moved = store(self._drop(self.probabilities * (t_logits - t_lse)))
        t_out = store(multiply(self.kept, t_value) + multiply(moved, self.factors.value))
        return Tangents(self._heads_last(t_out, self.N), self._rows(t_lse))

    def tangent_sizes(self, along: dict[str, Any]) -> Tangents:
        """Return the sizes of the terms that each of `tangents` is the sum of, as `sizes` does."""
        (t_query, t_key, t_value), t_logits, t_lse = self._moved(along)
        query, key, value, products, scale = map(np.square, self.factors)
        moved = np.square(self._drop(self.probabilities * (t_logits - t_lse)))
        out = np.square(self.kept) @ np.square(t_value) + moved @ value
        terms = np.square(t_query) @ key.swapaxes(2, 3) + query @ np.square(t_key).swapaxes(2, 3)
        terms = terms * scale + products * np.square(self._along(along, "scale", ())) + np.square(t_logits)
        lse = (self.probabilities * terms).sum(axis=-1, keepdims=True) + np.square(t_lse)
        return Tangents(np.sqrt(self._heads_last(out, self.N)), np.sqrt(self._rows(lse)))

    def _moved(self, along: dict[str, Any]) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
        """Tangents of queries, keys and values as factors, of the logits, and of the log-sum-exp."""
        call, multiply, factors = self.call, self.precision.multiply, self.factors
        lengths = dict(query=call.query_seq_lengths, key=call.key_value_seq_lengths, value=call.key_value_seq_lengths)
        t_query, t_key, t_value = moving = tuple(
            self._heads_first(_zero_padding(self._along(along, name, getattr(call, name).shape), of))
            for name, of in lengths.items()
        )
        products = multiply(t_query, factors.key.swapaxes(2, 3)) + multiply(factors.query, t_key.swapaxes(2, 3))
        scaled = products * factors.scale + factors.products * self._along(along, "scale", ())
        # What is not seen may hold anything.
        t_logits = np.where(self.logits > -np.inf, self._t_modified(scaled, along), 0).astype(t_value.dtype)
        t_sinks = np.where(self.empty, 0, self._along(along, "sinks", (self.N,))[:, None, None])
        t_lse = (self.probabilities * t_logits).sum(axis=-1, keepdims=True) + self.sink_probability * t_sinks
        return moving, t_logits, t_lse

    def _along(self, along: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(along.get(name, np.zeros(shape))).astype(self.precision.accumulator)

    def _t_modified(self, t_logits: np.ndarray, along: dict[str, Any]) -> np.ndarray:
        """Tangents of logits, from those of the scaled products."""
        call, dtype = self.call, self.precision.accumulator
        if call.logits_soft_cap is not None:
            t_logits = t_logits * (1 - self.tanh**2)
        if call.bias is not None:
            t_logits = t_logits + self._pairs(self._along(along, "bias", call.bias.shape))
        if call.alibi_slopes is not None:
            slopes = self._along(along, "alibi_slopes", (self.N,))[:, None, None]
            t_logits = t_logits - slopes * np.abs(self.distance).astype(dtype)
        if call.score_mod is not None:
            arrays = along.get("score_mod_arrays", jax.tree.map(np.zeros_like, call.score_mod_arrays))
            t_logits = self.push_score_mod(np.where(self.visible, t_logits, 0), arrays)
        return t_logits

    def sizes(self) -> Results:
        """Return the size of the terms that each of `results` is the sum of: the root of the sum of their squares."""
        squares = _Factors(*map(np.square, self.factors))
        squares = squares._replace(products=squares.query @ squares.key.swapaxes(2, 3))
        probabilities, kept = np.square(self.probabilities), np.square(self.kept)
        finite = lambda array: np.where(np.isfinite(array), array, 0)
        logits = squares.products * squares.scale + np.square(finite(self.logits))
        lse = (self.probabilities * logits).sum(axis=-1, keepdims=True) + np.square(finite(self.lse))
        out, lse = self._heads_last(kept @ squares.value, self.N), self._rows(lse)
        if self.call.d_out is None:
            return Results(np.sqrt(out), np.sqrt(lse), {})
        d_out, d_lse = map(np.square, self._cotangents())
        d_probabilities = self._drop(d_out @ squares.value.swapaxes(2, 3))
        delta = (probabilities * d_probabilities).sum(axis=-1, keepdims=True)
        d_logits = probabilities * (d_probabilities + delta + d_lse)
        d_sink = np.square(self.sink_probability) * (delta + d_lse)
        gradients = self._gradients(squares, kept, np.square(self.distance), d_logits, d_sink, d_out)
        return jax.tree.map(lambda square: np.sqrt(np.abs(square)), Results(out, lse, gradients))

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """[B, N, T, 1] -> [*B, T, N]."""
        return array[..., 0].swapaxes(1, 2).reshape(*self.batch_axes, self.T, self.N)

    def _cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cotangents of output and LSE. A row that sees nothing is constant, so nothing comes back through
        it."""
        d_out = np.where(self.empty, 0, self._heads_first(self.call.d_out))
        d_lse = np.where(self.empty, 0, self._heads_first(self.call.d_lse[..., None]))
        return d_out, d_lse

    def _gradients(
        self,
        factors: _Factors,
        kept: np.ndarray,
        distance: np.ndarray,
        d_logits: np.ndarray,
        d_sink: np.ndarray,
        d_out: np.ndarray,
    ) -> dict[str, Any]:
        """Return the gradients from the logits back to every argument that the call has."""
        call, gradients = self.call, {}
        if call.sinks is not None:
            gradients["sinks"] = _sum_to(d_sink, (self.N, 1, 1)).reshape(self.N)
        if call.score_mod is not None:
            d_logits, d_arrays = self.pull_score_mod(d_logits)
            gradients |= {"score_mod_arrays": d_arrays} if d_arrays else {}
        if call.alibi_slopes is not None:
            gradients["alibi_slopes"] = -_sum_to(d_logits * distance, (self.N, 1, 1)).reshape(self.N)
        if call.bias is not None:
            gradients["bias"] = _sum_to(d_logits.reshape(*self.batch_axes, *d_logits.shape[1:]), call.bias.shape)
        if call.logits_soft_cap is not None:
            d_logits = d_logits * (1 - self.tanh**2)
        if isinstance(call.scale, np.ndarray):
            gradients["scale"] = _sum_to(d_logits * factors.products, ())
        d_products, multiply = d_logits * factors.scale, self.precision.multiply
        return gradients | {
            "query": self._heads_last(multiply(d_products, factors.key), self.N),
            "key": self._heads_last(multiply(d_products.swapaxes(2, 3), factors.query), self.K),
            "value": self._heads_last(multiply(kept.swapaxes(2, 3), d_out), self.K),
        }


def _zero_padding(array: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """[*B, T, n, H] with zeros at and past the lengths."""
    if lengths is None:
        return array
    return np.where((np.arange(array.shape[-3]) < lengths[..., None])[..., None, None], array, 0)


def _sum_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes along which `shape` was broadcast."""
    padded = (1,) * (array.ndim - len(shape)) + shape
    return array.sum(axis=tuple(axis for axis, size in enumerate(padded) if size == 1), keepdims=True).reshape(shape)
