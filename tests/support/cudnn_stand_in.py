"""A stand-in for jax.nn's attention by cuDNN, on any machine: what it takes, what it keeps for its backward, and what
it leaves undefined.

It takes what `jax.nn.dot_product_attention(implementation="cudnn")` takes on a Blackwell when it is differentiated
(jax 0.11.2 to 0.12, cuDNN 9.12 to 9.19); all else is an error, as it is there. Where cuDNN promises nothing, past a
length and in a row without a key, results hold NaN. As there, the backward reads the forward's results from its
residuals, and padding in its operands like any number; and the compiler may not split what jflash has split.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning


def dot_product_attention(query: Any, key: Any, value: Any, *, implementation: str, **options: Any) -> Any:
    """jax.nn's, of the arguments that jflash gives."""
    assert implementation == "cudnn"
    queries, keys = options.pop("query_seq_lengths"), options.pop("key_value_seq_lengths")
    (batch, T, N, H), (S, K) = query.shape, key.shape[1:3]
    assert key.shape == value.shape == (batch, S, K, H)
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (jnp.bfloat16, jnp.float16)
    assert H % 8 == 0
    assert H <= 128
    assert N % K == 0
    assert T % 2 == S % 2 == 0
    scale, is_causal, window = (options.pop(name) for name in ("scale", "is_causal", "local_window_size"))
    assert not options
    assert isinstance(scale, float)
    assert scale > 0
    # Beside a window that is not causal, jax.nn forgets what is right of it (jax#39576).
    assert window is None or (window[1] == 0 and is_causal and T <= S)
    for lengths in (queries, keys):
        assert lengths is None or (lengths.shape == (batch,) and lengths.dtype == jnp.int32)
    if queries is not None or keys is not None:
        queries = jnp.full(batch, T, jnp.int32) if queries is None else queries
        keys = jnp.full(batch, S, jnp.int32) if keys is None else keys
    return _fused(scale, is_causal, None if window is None else window[0], query, key, value, queries, keys)


def _logits(scale: float, is_causal: bool, left: int | None, query: Any, key: Any, keys: Any) -> Any:
    """[B, N, T, S] in float32."""
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = product("btnh,bsnh->bnts", query, key) * scale
    i, j = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    visible = (j <= i) if is_causal else jnp.ones((1, 1), bool)
    visible = visible if left is None else visible & (i - j <= left)
    visible = visible if keys is None else visible & (j < keys[:, None, None, None])
    return jnp.where(visible, logits, -jnp.inf)


def _outside(lengths: Any, length: int) -> Any:
    """[B, L, 1, 1]: past the lengths."""
    outside = jnp.zeros((1, length), bool) if lengths is None else jnp.arange(length) >= lengths[:, None]
    return outside[:, :, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(*args: Any) -> Any:
    return _forward(*args)[0]


def _forward(*args: Any) -> Any:
    out, lse = _results(*args)
    return out, (*args[3:], lse, out)


def _backward(*args: Any) -> Any:
    *static, residuals, d_out = args
    return *_gradients(*static, *residuals, d_out), None, None


_fused.defvjp(_forward, _backward)


def _whole(function: Any) -> Any:
    """`function` for one device, with a rule for more, as jax.nn's has one."""

    def partition(*_: Any) -> Any:
        raise AssertionError("It was called with more than one device's part.")

    partitioned = custom_partitioning(function, static_argnums=(0, 1, 2))
    partitioned.def_partition(partition=partition, sharding_rule="... -> ...")
    return partitioned


@_whole
def _results(scale: Any, is_causal: Any, left: Any, query: Any, key: Any, value: Any, queries: Any, keys: Any) -> Any:
    logits = _logits(scale, is_causal, left, query, key, keys)
    largest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    values = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    out = product("bnts,bsnh->btnh", exponentials.astype(query.dtype), values) / jnp.moveaxis(total, 1, 2)
    outside = _outside(queries, query.shape[1])
    out = jnp.where(outside, jnp.nan, out).astype(query.dtype)
    lse = jnp.where(outside[:, None, :, 0, 0], jnp.nan, (largest + jnp.log(total))[..., 0])
    return out, lse


@_whole
def _gradients(scale: Any, is_causal: Any, left: Any, *arrays: Any) -> Any:
    query, key, value, queries, keys, lse, out, d_out = arrays
    group, dtype = query.shape[2] // key.shape[2], query.dtype
    key_wide, value_wide = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    probabilities = jnp.exp(_logits(scale, is_causal, left, query, key, keys) - lse[..., None])
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    delta = (out.astype(jnp.float32) * d_out).sum(axis=-1)
    d_logits = product("btnh,bsnh->bnts", d_out, value_wide) - jnp.moveaxis(delta, 1, 2)[..., None]
    d_logits = (d_logits * probabilities).astype(dtype)
    d_query = product("bnts,bsnh->btnh", d_logits, key_wide) * scale
    d_key = product("bnts,btnh->bsnh", d_logits, query) * scale
    d_value = product("bnts,btnh->bsnh", probabilities.astype(dtype), d_out)

    def finished(gradient: Any, like: Any, lengths: Any) -> Any:
        heads = gradient.reshape(*like.shape[:3], -1, like.shape[3]).sum(axis=3)
        return jnp.where(_outside(lengths, like.shape[1]), jnp.nan, heads).astype(dtype)

    return finished(d_query, query, queries), finished(d_key, key, keys), finished(d_value, value, keys)
