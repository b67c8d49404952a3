"""The oracle: the truth of a call, and the error that a backend may have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_attention import Call, PlainAttention, Precision, Results, Tangents


@functools.lru_cache(maxsize=2)
def _widest(call: Call) -> PlainAttention:
    """Return the arrays in float64, and those of a float64 call in the widest float there is."""
    return PlainAttention(call, Precision(np.dtype(np.longdouble if call.query.dtype == np.float64 else np.float64)))


@functools.lru_cache(maxsize=2)
def exact(call: Call) -> Results:
    """The truth."""
    return _widest(call).results()


def _rounding(call: Call, operand_bits: int | None = None) -> PlainAttention:
    """The yardstick: rounded where `jax.nn.dot_product_attention` rounds. Logits, softmax and sums are in float32 at
    least; the probabilities, their cotangent or tangent, and the results in the call's dtype."""
    dtype = call.query.dtype
    return PlainAttention(call, Precision(np.promote_types(dtype, np.float32), dtype, operand_bits))


def plain(call: Call) -> Results:
    """The yardstick's results."""
    return _rounding(call).results()


def tf32(call: Call) -> Results:
    """What plain attention with operands of TF32's bits makes of a call."""
    return _rounding(call, operand_bits=11).results()


@functools.lru_cache(maxsize=2)
def tolerances(call: Call, *, by_rows: bool = True, by_lse: bool = False) -> Results:
    """Return the largest error allowed in each result, by the rule of README and limits.md, in the same words.

    It is at most twice that of plain attention in the call's own dtype, and a few roundings of the result and of its
    terms, which matter where plain attention is exact by luck, as with a single key or in a result of few entries
    (`_roundings`). Two kinds of gradients may have, besides, twice what knowing only output and log-sum-exp costs, with
    all else exact. `by_rows`: that of a bias which all keys share beside a `score_mod`, where a kernel adds up dS over
    a query's keys (`_error_of_rows`). `by_lse`: every gradient where logits are in the hundreds or more. Where products
    are exact, plain attention has no error of such logits, and a backward has the log-sum-exp's rounding.
    """
    truth, yardstick, sizes = exact(call), plain(call), _widest(call).sizes()
    dtype = call.query.dtype
    accumulator = np.promote_types(dtype, np.float32)
    logits = truth.lse.size * call.key.shape[-3]

    def allowed(
        truth: np.ndarray, plain: np.ndarray, size: np.ndarray, features: int = 1, dtype: np.dtype = dtype
    ) -> float:
        terms = logits * features / max(truth.size, 1)
        roundings = _roundings(terms, dtype, accumulator)
        largest = np.max(np.hypot(size, np.where(np.isfinite(truth), truth, 0)), initial=0)
        return 2 * error(plain, truth) + roundings * float(largest)

    def gradient(name: str) -> Any:
        features = getattr(call, name).shape[-1] if name in ("query", "key", "value") else 1
        arrays = (results.gradients[name] for results in (truth, yardstick, sizes))
        found = jax.tree.map(functools.partial(allowed, features=features), *arrays)
        if name == "bias" and by_rows and call.score_mod is not None:
            found += 2 * _error_of_rows(call, yardstick)
        if by_lse:
            recomputed = _widest(call).results(residuals=yardstick).gradients[name]
            found = jax.tree.map(
                lambda found, *pair: found + 2 * error(*pair), found, recomputed, truth.gradients[name]
            )
        return found

    out, lse, _ = zip(truth, yardstick, sizes, strict=True)
    return Results(
        allowed(*out, features=call.value.shape[-1]),
        # Each of the terms is the exponential of a sum itself.
        allowed(*lse, features=call.key.shape[-1], dtype=accumulator),
        {name: gradient(name) for name in truth.gradients},
    )


def _error_of_rows(call: Call, residuals: Results) -> float:
    """Return what knowing only these results of the forward costs the gradient of a bias that all keys share.

    A query's dS adds up to 0 but for the log-sum-exp's cotangent, or nearly so. What a sum over its keys has instead is
    the error of delta, and so that of the output, rounded; all else here is in float64.
    """
    if call.bias.ndim > 0 and call.bias.shape[-1] > 1:
        return 0.0
    return error(_widest(call).results(residuals=residuals).gradients["bias"], exact(call).gradients["bias"])


def _roundings(terms: float, dtype: np.dtype, accumulator: np.dtype) -> float:
    """Return what the roundings of one result may add up to, relative to it and to the size of the terms of its sum."""
    return 2 * float(jnp.finfo(dtype).eps) + 0.5 * float(np.finfo(accumulator).eps) * math.log2(max(terms, 1))


def error(got: Any, truth: np.ndarray) -> float:
    """The largest absolute difference. Infinities must be the same; a NaN, or another shape, is an infinite error."""
    got = np.asarray(got)
    if got.shape != truth.shape:
        return math.inf
    # The cast too: it warns of a signaling NaN.
    with np.errstate(invalid="ignore"):
        got = got.astype(truth.dtype)
        difference = np.where(got == truth, 0, np.abs(got - truth))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0))


def assert_right(
    got: Results, call: Call, *, as_tf32: bool = False, by_rows: bool = True, by_lse: bool = False
) -> None:
    """Every result is within its tolerance, or `as_tf32` within the error of plain attention with products in TF32.

    Every gradient may then have, besides, what knowing only that attention's output and log-sum-exp costs.
    """
    allowed, truth = tolerances(call, by_rows=by_rows, by_lse=by_lse), exact(call)
    if as_tf32:
        by_tf32 = tf32(call)
        recomputed = _widest(call).results(residuals=by_tf32)
        larger = lambda least, truth, *others: max(least, sum(error(other, truth) for other in others))
        allowed = jax.tree.map(larger, allowed, truth, by_tf32, recomputed)
    assert_within(got, truth, allowed)


def assert_tangents_right(
    got: Tangents, call: Call, along: dict[str, Any], *, as_tf32: bool = False, in_tf32: bool = False
) -> None:
    """Assert that both tangents, along those of some operands, are near enough to the truth.

    The error is at most twice plain attention's own, with a few roundings on top; or `as_tf32` that of plain attention
    with operands of TF32's bits, or twice that if its own products are `in_tf32`.
    """
    wide, dtype = _widest(call), call.query.dtype
    truth, accumulator = wide.tangents(along), np.promote_types(dtype, np.float32)
    bits = (None, 11) if as_tf32 else (None,)
    yardsticks = [_rounding(call, operand_bits).tangents(along) for operand_bits in bits]

    def allowed(truth: np.ndarray, size: np.ndarray, dtype: np.dtype, *plain: np.ndarray) -> float:
        roundings = _roundings(call.key.shape[-3] * call.query.shape[-1], dtype, accumulator)
        least = 2 * error(plain[0], truth) + roundings * float(np.max(np.hypot(size, truth), initial=0))
        return max(least, *((1 + in_tf32) * error(other, truth) for other in plain))

    limits = map(allowed, truth, wide.tangent_sizes(along), (dtype, accumulator), *yardsticks)
    assert_within(got, truth, Tangents(*limits))


def draw_tangents(call: Call) -> dict[str, Any]:
    """Return tangents of all operands that may move, random but the same for the same shapes."""
    numbers = np.random.default_rng(0)
    normal = lambda array: np.asarray(numbers.standard_normal(array.shape)).astype(array.dtype)
    return jax.tree.map(normal, split(call)[0])


def run_tangents(attention: Callable[..., Any], call: Call, along: dict[str, Any]) -> Tangents:
    """Return what `attention` makes of a call's tangents, compiled."""
    smooth, discrete, static = split(call)
    fixed = {name: array for name, array in smooth.items() if name not in along}
    function = function_of_arrays(attention, static)
    push = lambda point, along: jax.jvp(lambda point: function({**fixed, **point}, discrete), (point,), (along,))[1]
    return Tangents(*jax.jit(push)({name: smooth[name] for name in along}, along))


def assert_within(got: Any, want: Any, allowed: Any) -> None:
    """Every array is nearer than `allowed`; names those that are not."""
    errors = jax.tree.leaves_with_path(jax.tree.map(lambda got, want: error(got, np.asarray(want)), got, want))
    wrong = [
        f"{jax.tree_util.keystr(path)}: error {error:.3g}, allowed {allowed:.3g}"
        for (path, error), allowed in zip(errors, jax.tree.leaves(allowed), strict=True)
        if not error <= allowed
    ]
    assert not wrong, "\n".join(wrong)


def run(attention: Callable[..., Any], call: Call) -> Results:
    """Return what `attention` makes of a call. Arrays are arguments of one jitted function, kept for the next such
    call."""
    smooth, discrete, static = split(call)
    return _forward_and_backward(attention, tuple(static.items()))(smooth, discrete, (call.d_out, call.d_lse))


def split(call: Call) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A call's arguments: arrays that have a gradient, arrays that have none, and the rest."""
    options = arguments(call) | {"score_mod": call.score_mod, "score_mod_arrays": call.score_mod_arrays}
    smooth = {name: option for name, option in options.items() if _holds(option, jnp.inexact)}
    discrete = {name: option for name, option in options.items() if _holds(option, np.generic) and name not in smooth}
    return smooth, discrete, {name: option for name, option in options.items() if name not in (*smooth, *discrete)}


def function_of_arrays(attention: Callable[..., Any], static: dict[str, Any]) -> Callable[..., Any]:
    """Output and log-sum-exp of the two kinds of arrays that `split` gives."""

    def function(smooth: dict[str, Any], discrete: dict[str, Any]) -> Any:
        merged = {**static, **smooth, **discrete}
        score_mod, score_mod_arrays = merged.pop("score_mod"), merged.pop("score_mod_arrays")
        if score_mod is not None:
            merged["score_mod"] = score_mod(*score_mod_arrays)
        return attention(**merged, return_residual=True)

    return function


@functools.lru_cache(maxsize=64)
def _forward_and_backward(attention: Callable[..., Any], static: tuple[tuple[str, Any], ...]) -> Callable[..., Results]:
    function = function_of_arrays(attention, dict(static))

    @jax.jit
    def forward_and_backward(smooth: dict[str, Any], discrete: dict[str, Any], cotangents: Any) -> Results:
        (out, lse), pull_back = jax.vjp(lambda smooth: function(smooth, discrete), smooth)
        return Results(out, lse, *pull_back(cotangents))

    return forward_and_backward


def arguments(call: Call, **more: Any) -> dict[str, Any]:
    """The keyword arguments of `jflash.attention` for a call."""
    options = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    if call.score_mod is not None:
        options["score_mod"] = call.score_mod(*map(jnp.asarray, call.score_mod_arrays))
    not_arguments = ("score_mod_arrays", "keep", "d_out", "d_lse")
    return {name: option for name, option in options.items() if name not in not_arguments} | more


def _holds(option: Any, kind: Any) -> bool:
    """Whether an argument is an array, or a tuple of arrays, of this kind of dtype."""
    leaves = jax.tree.leaves(option)
    return bool(leaves) and all(isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, kind) for x in leaves)
