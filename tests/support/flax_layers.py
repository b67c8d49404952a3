"""The attention layers of flax.nnx and flax.linen as functions of their parameters, for the tests."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from layers import filled, normal

HEADS, FEATURES, HEAD_DIM, OUT_FEATURES = 4, 12, 8, 10
LENGTH = 13

Layer = tuple[Callable[..., jax.Array], Any]
"""A function of (parameters, inputs, **of the layer's call), and the parameters."""


def nnx_module(inputs: Any, **options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        HEADS,
        inputs[0].shape[-1],
        HEADS * HEAD_DIM,
        OUT_FEATURES,
        in_kv_features=inputs[-1].shape[-1],
        rngs=nnx.Rngs(0),
        keep_rngs=False,
        **{"decode": False, **options},
    )


def linen_module(**options: Any) -> linen.MultiHeadDotProductAttention:
    return linen.MultiHeadDotProductAttention(
        HEADS, qkv_features=HEADS * HEAD_DIM, out_features=OUT_FEATURES, **options
    )


def nnx_layer(inputs: Any, **options: Any) -> Layer:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: nnx_module(inputs, **options)))

    def apply(parameters: Any, inputs: Any, dropout: Any = None, **call: Any) -> jax.Array:
        rngs = None if dropout is None else nnx.Rngs(dropout=dropout)
        return nnx.merge(graph, parameters)(*inputs, rngs=rngs, **call)

    return apply, filled(shapes)


def linen_layer(inputs: Any, **options: Any) -> Layer:
    layer = linen_module(**options)
    shapes = jax.eval_shape(functools.partial(layer.init, deterministic=True), jax.random.key(0), *inputs)

    def apply(parameters: Any, inputs: Any, dropout: Any = None, **call: Any) -> jax.Array:
        return layer.apply(parameters, *inputs, dropout_rng=dropout, **call)

    return apply, filled(shapes)


FRAMEWORKS = {"nnx": nnx_layer, "linen": linen_layer}
both_frameworks = pytest.mark.parametrize("make", FRAMEWORKS.values(), ids=FRAMEWORKS)


def self_attention(*batch: int) -> tuple[np.ndarray, ...]:
    return (normal(1, (*batch, LENGTH, FEATURES)),)


def causal_mask(*batch: int, **dtype: Any) -> jax.Array:
    return linen.make_causal_mask(jnp.ones((*batch, LENGTH)), **dtype)
