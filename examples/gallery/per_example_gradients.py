"""Per-example gradients: the gradient of each example's own loss with respect to weights that all share.

`jax.vmap` of `jax.grad` works as for any function. The batch axis that vmap makes becomes one of attention's batch
axes, so this is one call with as many heads at work as in training, and not a loop. Differentially private training
clips the norm of each gradient before it adds them up.

Source: Abadi et al. (2016), arXiv:1607.00133.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report
from jax import Array

import jflash

EXAMPLES, TOKENS, HEADS, HEAD_DIM = 6, 128, 2, 16
WIDTH = HEADS * HEAD_DIM


def loss(attention: Callable[..., Array], weights: Array, example: Array) -> Array:
    """Return the loss of one layer on one example [tokens, width].

    `weights` [3, width, heads, head_dim] make query, key and value.
    """
    query, key, value = jnp.einsum("tc,pcnh->ptnh", example, weights)
    return (attention(query, key, value, is_causal=True).reshape(example.shape) - example).var()


def attend(weights: Array, examples: Array) -> dict[str, Array]:
    """The gradients [examples, 3, width, heads, head_dim], and their sum clipped to norms of at most 1."""
    gradient = jax.grad(lambda weights, example: loss(jflash.attention, weights, example))
    gradients = jax.vmap(gradient, in_axes=(None, 0))(weights, examples)
    norms = jnp.sqrt((gradients**2).sum(axis=(1, 2, 3, 4), keepdims=True))
    return {"gradients": gradients, "clipped sum": (gradients / jnp.maximum(norms, 1)).sum(axis=0)}


def plain(weights: Array, examples: Array) -> dict[str, Array]:
    """One example after the other."""
    gradient = jax.grad(lambda weights, example: loss(jax.nn.dot_product_attention, weights, example))
    gradients = [gradient(weights, example) for example in examples]
    clipped = [each / jnp.maximum(jnp.linalg.norm(each.ravel()), 1) for each in gradients]
    return {"gradients": jnp.stack(gradients), "clipped sum": sum(clipped, jnp.zeros_like(weights))}


def main() -> Report:
    """All gradients, and the sum that a private optimizer would add noise to."""
    weights, examples = normal((3, WIDTH, HEADS, HEAD_DIM), (EXAMPLES, TOKENS, WIDTH))
    errors = compare([attend], plain, [weights / WIDTH**0.5, examples])
    return report(f"Gradients of {EXAMPLES} examples, causal", errors, (TOKENS + 1) / (2 * TOKENS))


if __name__ == "__main__":
    main()
