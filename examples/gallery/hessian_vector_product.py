"""Hessian-vector product: how the gradient changes along a direction, without the Hessian.

`jax.jvp` of `jax.grad` works as for any function. Attention has derivatives of every order in both modes, and none
needs an array of all pairs: each tile is computed again. Second-order optimizers, influence functions and measures of
curvature are made of such products.

Source: Pearlmutter (1994), doi:10.1162/neco.1994.6.1.147.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from _report import Report, compare, normal, report
from jax import Array

import jflash

TOKENS, HEADS, HEAD_DIM = 512, 2, 32
NAMES = ("query", "key", "value")


def along(attention: Callable[..., Array], arrays: list[Array], direction: list[Array]) -> dict[str, Array]:
    """The gradient of a loss, and its derivative along `direction`, both with respect to query, key and value."""

    def loss(query: Array, key: Array, value: Array) -> Array:
        return jnp.square(attention(query, key, value, is_causal=True)).sum()

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    gradients, products = jax.jvp(gradient, tuple(arrays), tuple(direction))
    named = lambda form, parts: {form.format(name): part for name, part in zip(NAMES, parts, strict=True)}
    return named("gradient of {}", gradients) | named("product, part of {}", products)


def attend(*arrays: Array) -> dict[str, Array]:
    """Return gradient and product as a function of query, key and value, and the direction's three."""
    return along(jflash.attention, list(arrays[:3]), list(arrays[3:]))


def plain(*arrays: Array) -> dict[str, Array]:
    """The same through attention that holds all pairs."""
    return along(jax.nn.dot_product_attention, list(arrays[:3]), list(arrays[3:]))


def main() -> Report:
    """All three parts of the gradient and of the product."""
    arrays = normal(*[(1, TOKENS, HEADS, HEAD_DIM)] * 6)
    return report("Hessian-vector product, causal", compare([attend], plain, arrays), (TOKENS + 1) / (2 * TOKENS))


if __name__ == "__main__":
    main()
