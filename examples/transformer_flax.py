"""GPT-2 of any size in Flax (nnx), with jflash, the layer's own attention, or jax.nn's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jflash.flax


def jax_nn_attention_fn(query: Any, key: Any, value: Any, *, implementation: str, is_causal: bool, **_: Any) -> Any:
    """Attend by jax.nn; what else the layer passes is not used by this model."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation=implementation)


# All that changes for a Flax user is this argument of the layer.
ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "jflash": jflash.flax.attention_fn,
    "own": nnx.dot_product_attention,
    "xla": functools.partial(jax_nn_attention_fn, implementation="xla"),
    "cudnn": functools.partial(jax_nn_attention_fn, implementation="cudnn"),
}


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, attention: str, dtype: Any, rngs: nnx.Rngs):
        """Make a block of `width` numbers for each token, a multiple of `heads`."""
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, attention_fn=ATTENTION[attention], decode=False, rngs=rngs
        )
        self.perceptron_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Return `[B, T, width]` for `[B, T, width]`."""
        hidden += self.attention(self.attention_norm(hidden), is_causal=True)
        return hidden + self.down(nnx.gelu(self.up(self.perceptron_norm(hidden))))


class Transformer(nnx.Module):
    """A model that gives the logits of the next token."""

    def __init__(
        self,
        tokens: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        *,
        attention: str,
        seed: int,
        dtype: Any = jnp.float32,
    ):
        """Make a model for `tokens` different tokens and sequences of at most `length`.

        `attention` is a name of `ATTENTION`. `dtype` is that of the activations; the weights are float32.
        """
        rngs = nnx.Rngs(seed)
        embed = functools.partial(nnx.Embed, dtype=dtype, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.token = embed(tokens, width)
        self.position = embed(length, width)
        self.blocks = nnx.List([Block(width, heads, attention, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits `[B, T, tokens]` for tokens `[B, T]`."""
        hidden = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.token.attend(self.norm(hidden))


def split(model: Transformer) -> tuple[nnx.State, Callable[[nnx.State, jax.Array], jax.Array]]:
    """Return the parameters, and the function of parameters and tokens that gives the logits."""
    structure, parameters = nnx.split(model)
    return parameters, lambda parameters, tokens: nnx.merge(structure, parameters)(tokens)
