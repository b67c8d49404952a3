"""A small causal transformer in Flax (nnx), with jflash or with the layer's own attention."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jflash.flax


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, attention_fn: Callable[..., jax.Array], rngs: nnx.Rngs):
        """`width` numbers for each token, a multiple of `heads`."""
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, attention_fn=attention_fn, decode=False, rngs=rngs
        )
        self.perceptron_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """`[B, T, width]` to the same."""
        hidden += self.attention(self.attention_norm(hidden), is_causal=True)
        return hidden + self.down(nnx.gelu(self.up(self.perceptron_norm(hidden))))


class Transformer(nnx.Module):
    """Logits of the next token."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int, *, use_jflash: bool, seed: int):
        """For `tokens` different tokens and sequences of at most `length`."""
        rngs = nnx.Rngs(seed)
        # All that changes for a Flax user is this argument of the layer.
        attention_fn = jflash.flax.attention_fn if use_jflash else nnx.dot_product_attention
        self.token = nnx.Embed(tokens, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, attention_fn, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, tokens, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens `[B, T]` to logits `[B, T, tokens]`."""
        hidden = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.logits(self.norm(hidden))


def split(model: Transformer) -> tuple[nnx.State, Callable[[nnx.State, jax.Array], jax.Array]]:
    """The parameters, and the function of parameters and tokens that gives the logits."""
    structure, parameters = nnx.split(model)
    return parameters, lambda parameters, tokens: nnx.merge(structure, parameters)(tokens)
