"""Plain attention in JAX, for JAX to differentiate: what derivatives of every order and mode are held against.

Independent of jflash. It rounds where `jax.nn.dot_product_attention` does: logits, softmax and sums are in float32 at
least, the probabilities and the output in the call's dtype.
"""

import jax
import jax.numpy as jnp


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: jax.Array | float | None = None,
    sinks: jax.Array | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output `[B, T, N, D]` and log-sum-exp `[B, T, N]`; every query must see a key."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, group, axis=2) for array in (key, value))
    logits = jnp.einsum("bind,bjnd->bnij", query, key, preferred_element_type=dtype)
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    visible = jnp.ones(logits.shape[2:], bool)
    if is_causal:
        visible = jnp.tril(visible)
    if key_value_seq_lengths is not None:
        visible = visible & (jnp.arange(key.shape[1]) < key_value_seq_lengths[:, None, None, None])
    logits = jnp.where(visible, logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(dtype)[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    probabilities = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]].astype(query.dtype)
    out = jnp.einsum("bnij,bjnd->bind", probabilities, value, preferred_element_type=dtype)
    return out.astype(query.dtype), jnp.swapaxes(jax.nn.logsumexp(logits, axis=-1), 1, 2)
