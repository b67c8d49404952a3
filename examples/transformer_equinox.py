"""A small causal transformer in Equinox, with jflash or with the layer's own attention."""

from __future__ import annotations

from collections.abc import Callable

import equinox
import jax
import jax.numpy as jnp

import jflash.equinox


class Block(equinox.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a shortcut."""

    attention_norm: equinox.nn.LayerNorm
    attention: equinox.nn.MultiheadAttention
    perceptron_norm: equinox.nn.LayerNorm
    perceptron: equinox.nn.MLP

    def __init__(self, width: int, heads: int, *, use_jflash: bool, key: jax.Array):
        """Make a block of `width` numbers for each token, a multiple of `heads`."""
        attention_key, perceptron_key = jax.random.split(key)
        # All that changes for an Equinox user is the layer's class, and is_causal=True in place of a mask.
        layer = jflash.equinox.MultiheadAttention if use_jflash else equinox.nn.MultiheadAttention
        self.attention_norm = equinox.nn.LayerNorm(width)
        self.attention = layer(heads, width, key=attention_key)
        self.perceptron_norm = equinox.nn.LayerNorm(width)
        self.perceptron = equinox.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=perceptron_key)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Return `[T, width]` for `[T, width]`."""
        normal = jax.vmap(self.attention_norm)(hidden)
        if isinstance(self.attention, jflash.equinox.MultiheadAttention):
            hidden += self.attention(normal, normal, normal, is_causal=True)
        else:
            hidden += self.attention(normal, normal, normal, mask=jnp.tri(len(hidden), dtype=bool))
        return hidden + jax.vmap(self.perceptron)(jax.vmap(self.perceptron_norm)(hidden))


class Transformer(equinox.Module):
    """A model that gives the logits of the next token, for one sequence."""

    token: equinox.nn.Embedding
    position: equinox.nn.Embedding
    blocks: list[Block]
    norm: equinox.nn.LayerNorm
    logits: equinox.nn.Linear

    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int, *, use_jflash: bool, seed: int):
        """Make a model for `tokens` different tokens and sequences of at most `length`."""
        token_key, position_key, logits_key, *block_keys = jax.random.split(jax.random.key(seed), 3 + layers)
        self.token = equinox.nn.Embedding(tokens, width, key=token_key)
        self.position = equinox.nn.Embedding(length, width, key=position_key)
        self.blocks = [Block(width, heads, use_jflash=use_jflash, key=key) for key in block_keys]
        self.norm = equinox.nn.LayerNorm(width)
        self.logits = equinox.nn.Linear(width, tokens, key=logits_key)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits `[T, tokens]` for tokens `[T]`."""
        hidden = jax.vmap(self.token)(tokens) + self.position.weight[: len(tokens)]
        for block in self.blocks:
            hidden = block(hidden)
        return jax.vmap(self.logits)(jax.vmap(self.norm)(hidden))


def split(model: Transformer) -> tuple[Transformer, Callable[[Transformer, jax.Array], jax.Array]]:
    """Return the parameters, and the function of parameters and tokens `[B, T]` that gives the logits."""
    parameters, rest = equinox.partition(model, equinox.is_inexact_array)
    return parameters, lambda parameters, tokens: jax.vmap(equinox.combine(parameters, rest))(tokens)
