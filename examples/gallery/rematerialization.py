"""Rematerialization: `jax.checkpoint` forgets what a layer computed, but for what is dear to compute again.

The backward of attention needs its output and log-sum-exp. A policy that keeps both by name spares it the forward,
which is most of what a long sequence would compute again; the rest of the layer is forgotten. The names are those of
`jflash.RESIDUAL_CHECKPOINT_NAMES`, or what a call gives as `residual_checkpoint_name`.

Source: Chen et al. (2016), arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report
from jax import Array, lax

import jflash

LAYERS, TOKENS, HEADS, HEAD_DIM = 3, 512, 2, 32
KEEP = jax.checkpoint_policies.save_only_these_names(*jflash.RESIDUAL_CHECKPOINT_NAMES)


def layers(attention: Callable[..., Array], policy: Any, inputs: Array, weights: Array) -> Array:
    """Attention layers in turn, of [batch, tokens, heads, head_dim] and [layers, 3, heads, head_dim, head_dim]."""

    def layer(inputs: Array, weights: Array) -> tuple[Array, None]:
        query, key, value = jnp.einsum("btnh,pnhd->pbtnd", jnp.tanh(inputs), weights)
        return inputs + attention(query, key, value, is_causal=True), None

    return lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), inputs, weights)[0]


def gradients(attention: Callable[..., Array], policy: Any, inputs: Array, weights: Array) -> dict[str, Array]:
    """Return the gradients of a scalar made of the last layer's output."""
    loss = lambda *arrays: jnp.square(layers(attention, policy, *arrays)).mean()
    d_inputs, d_weights = jax.grad(loss, argnums=(0, 1))(inputs, weights)
    return {"d_inputs": d_inputs, "d_weights": d_weights}


def attend(inputs: Array, weights: Array) -> dict[str, Array]:
    """The gradients with one forward of attention for each layer."""
    return gradients(jflash.attention, KEEP, inputs, weights)


def forget(inputs: Array, weights: Array) -> dict[str, Array]:
    """The gradients with two: nothing of a layer is kept."""
    return gradients(jflash.attention, None, inputs, weights)


def plain(inputs: Array, weights: Array) -> dict[str, Array]:
    """The same through attention that holds all pairs."""
    return gradients(jax.nn.dot_product_attention, None, inputs, weights)


def main() -> Report:
    """Both, whose gradients are the same."""
    inputs, weights = normal((1, TOKENS, HEADS, HEAD_DIM), (LAYERS, 3, HEADS, HEAD_DIM, HEAD_DIM))
    errors = compare([attend, forget], plain, [inputs, weights / HEAD_DIM**0.5])
    return report(f"Gradients of {LAYERS} checkpointed layers, causal", errors, (TOKENS + 1) / (2 * TOKENS))


if __name__ == "__main__":
    main()
