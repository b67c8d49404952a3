"""cuDNN's attention, by way of `jax.nn.dot_product_attention(implementation="cudnn")`.

It is the default on NVIDIA Blackwell (compute capability 10.x), whose tensor cores no kernel of our own uses yet, and
serves by name on every NVIDIA GPU since Ampere. It takes a call only where jax.nn means by it what jflash does:

- Padding is zeroed before cuDNN reads it, and what cuDNN writes there is replaced.
- A query sees a key: one of a batch entry without keys is padding here, and what else could hide all keys is refused.
- The log-sum-exp is the residual of jax.nn's own derivative, in float32. jax.nn returns it in 16 bits.

The backward hands the forward's results to that derivative, so that cuDNN's forward runs once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jflash._platform import Platform
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash._semantics.tile import in_range, zero_padding

_attention = jax.nn.dot_product_attention
"""jax.nn's own, also inside `jflash.replacing_jax_nn`."""

_WITHOUT = {
    "scale": "`scale` that is traced",
    "mask": "`mask`: it gives the mean of all values to a query that sees no key",
    "bias": "`bias`: it takes one of -2.4e38 or less for -inf, and hides a key that has it",
    "alibi_slopes": "`alibi_slopes`",
    "sinks": "`sinks`",
    "query_segments": "`segment_ids`",
    "page_table": "`page_table`",
}
"""The operands that cuDNN does not take, as arguments of the user's."""


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Say why jax.nn and cuDNN cannot serve a call, in words for the user; `None`: they can."""
    if not platform.is_nvidia_since(8.0):
        return f"it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is {platform}."
    return next(_reasons(spec, platform), None)


def asked_before(spec: Spec, platform: Platform) -> str | None:
    """Return the backend before which `implementation=None` asks this one: none of our kernels is for Blackwell."""
    return "mosaic_gpu_mma" if (platform.compute_capability or "").startswith("10.") else None


def _reasons(spec: Spec, platform: Platform) -> Iterator[str]:
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        yield f"it takes bfloat16 and float16. Got {spec.dtype}."
    if spec.sequence_axes or spec.partial:
        yield "it takes whole sequences, and these are split over devices."
    for name, argument in _WITHOUT.items():
        if name in spec.operands:
            yield f"it has no {argument}."
    for argument, has in (
        ("logits_soft_cap", spec.logits_soft_cap is not None),
        ("score_mod", spec.score_mod is not None),
        ("mask_mod", spec.mask_mod is not None),
        ("dropout_rate", spec.dropout_rate > 0),
    ):
        if has:
            yield f"it has no `{argument}`."
    if spec.deterministic:
        yield "it adds up dQ in any order, and deterministic=True asks for the same bits on every run."
    if spec.scale is not None and spec.scale <= 0:
        yield f"it gives NaN where it hides keys with a `scale` that is not positive. Got {spec.scale}."
    yield from _reasons_of_visibility(spec)
    yield from _reasons_of_shape(spec, platform)


def _reasons_of_visibility(spec: Spec) -> Iterator[str]:
    left, right = spec.bounds
    if (left, right) == (None, None):
        return
    if spec.query_offset != 0:
        yield "its causal mask and its window begin at the top left: a `query_offset` other than 0 needs another."
    if right != 0:
        yield f"its windows end at the query. Got {right} keys to the right."
    if left is not None and spec.query_length > spec.key_length:
        got = f"Got T={spec.query_length} and S={spec.key_length}."
        yield f"its windows need as many keys as queries, or more. {got}"
    if left is not None and "key_lengths" in spec.operands:
        yield "it has no window beside `key_value_seq_lengths`: a query may see no key."


def _reasons_of_shape(spec: Spec, platform: Platform) -> Iterator[str]:
    if spec.head_dim != spec.value_dim or spec.head_dim % 8:
        yield f"H and D must be one multiple of 8. Got H={spec.head_dim} and D={spec.value_dim}."
    # jax.nn asks JAX's default device how wide heads may be, wherever the call runs.
    asks_hopper = platform.compute_capability == "9.0" and jax.default_backend() == "gpu"
    widest = 256 if asks_hopper else 128
    if spec.head_dim > widest:
        yield f"H must be at most {widest} on {platform}. Got H={spec.head_dim}."
    if spec.query_length % 2 or spec.key_length % 2:
        got = f"Got T={spec.query_length} and S={spec.key_length}."
        yield f"jax.nn differentiates it where T and S are even. {got}"


def unsupported_backward(spec: Spec) -> str | None:
    """Say why `backward` cannot serve a call that `forward` serves; `None`: it can."""
    return "it has no gradient of the log-sum-exp" if spec.lse_has_cotangent else None


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the query's dtype and the log-sum-exp in float32."""
    out, pull_back = _differentiable(spec, operands)
    lse = _residuals(pull_back, spec)[0]
    is_row = _rows(spec, operands)
    if is_row is None:
        return out, lse
    return jnp.where(is_row[:, :, None, None], out, 0), jnp.where(is_row[:, None], lse, -jnp.inf)


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Return the gradients of query, key and value."""
    _, pull_back = _differentiable(spec, operands)
    d_out, lse = residuals.d_out, residuals.lse
    is_row = _rows(spec, operands)
    if is_row is not None:
        d_out = jnp.where(is_row[:, :, None, None], d_out, 0)
        # Of such a row all that cuDNN makes is 0, if its probabilities are finite.
        lse = jnp.where(is_row[:, None], lse, 0)
    query, key, value = _with_residuals(pull_back, spec, lse, residuals.out)(d_out)
    if is_row is not None:
        query = jnp.where(is_row[:, :, None, None], query, 0)
    if operands.key_lengths is not None:
        key, value = (zero_padding(gradient, operands.key_lengths) for gradient in (key, value))
    return Operands(query, key, value)


def _rows(spec: Spec, operands: Operands) -> Bool[Array, "B T"] | None:
    """Say which queries have a result: they are within their length, and their batch entry has a key. `None`: all."""
    queries, keys = operands.query_lengths, operands.key_lengths
    if queries is None and keys is None:
        return None
    rows = jnp.arange(spec.query_length)[None]
    within = rows < (spec.query_length if queries is None else queries[:, None])
    within = within if keys is None else within & (keys[:, None] > 0)
    return jnp.broadcast_to(within, (spec.batch, spec.query_length))


def _differentiable(spec: Spec, operands: Operands) -> tuple[Array, Any]:
    """Return jax.nn's output, and its `jax.vjp` with respect to query, key and value."""
    query, key, value, queries, keys = (
        operands.query, operands.key, operands.value, operands.query_lengths, operands.key_lengths,
    )  # fmt: skip
    is_row = _rows(spec, operands)
    if is_row is not None:
        query = jnp.where(is_row[:, :, None, None], query, 0)
    if keys is not None:
        key, value = zero_padding(key, keys), zero_padding(value, keys)
    left, right = spec.bounds

    def attend(query: Array, key: Array, value: Array) -> Array:
        return _attention(
            query, key, value,
            scale=spec.scale,
            is_causal=right == 0,
            local_window_size=None if left is None else (left, 0),
            query_seq_lengths=_lengths(spec, "query_lengths", queries),
            key_value_seq_lengths=_lengths(spec, "key_lengths", keys),
            implementation="cudnn",
        )  # fmt: skip

    return jax.vjp(attend, query, key, value)


def _lengths(spec: Spec, name: str, lengths: Int32[Array, "#B"] | None) -> Int32[Array, "B"] | None:
    """Return the lengths as jax.nn takes them, none of them 0."""
    clamped = in_range(spec, name, lengths)
    return None if clamped is None else jnp.broadcast_to(jnp.maximum(clamped, 1), (spec.batch,))


def _residuals(pull_back: Any, spec: Spec) -> list[Array]:
    """Return what jax.nn's backward knows of its forward, the log-sum-exp and the output, from its `jax.vjp`."""
    leaves = jax.tree.leaves(pull_back)
    return [leaves[index] for index in _places(leaves, spec)]


def _with_residuals(pull_back: Any, spec: Spec, *residuals: Array) -> Any:
    """Return the `jax.vjp` with other residuals. The forward that gave its own is then not used, and not compiled."""
    leaves, tree = jax.tree.flatten(pull_back)
    for index, residual in zip(_places(leaves, spec), residuals, strict=True):
        leaves[index] = residual
    return jax.tree.unflatten(tree, leaves)


def _places(leaves: list[Array], spec: Spec) -> tuple[int, int]:
    """Return where among the leaves the log-sum-exp is, the one array in float32, and the output, which follows it."""
    forms = [(leaf.shape, leaf.dtype) for leaf in leaves]
    lse = ((spec.batch, spec.heads, spec.query_length), jnp.dtype(jnp.float32))
    out = ((spec.batch, spec.query_length, spec.heads, spec.value_dim), spec.dtype)
    place = forms.index(lse) if forms.count(lse) == 1 else -1
    if place < 0 or forms[place + 1 : place + 2] != [out]:
        raise RuntimeError(
            f"jax.nn's attention by cuDNN keeps other residuals in jax {jax.__version__} than jflash knows: {forms}."
        )
    return place, place + 1
