"""`jflash.flax.attention_fn` with `decode=True`: one position at a time, keys and values from the layer's cache."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_layers import (
    HEAD_DIM,
    HEADS,
    LENGTH,
    Layer,
    causal_mask,
    linen_layer,
    linen_module,
    nnx_layer,
    nnx_module,
    self_attention,
)
from layers import assert_within_rule, compiled, filled, float64
from short_run import cover

from jflash.flax import attention_fn


def nnx_decode(attention: Callable[[Any], Any], inputs: np.ndarray, **call: Any) -> jax.Array:
    """The outputs of decoding one position at a time; `attention(step)` is the `attention_fn` of that step."""
    layer = nnx.eval_shape(lambda: nnx_module((inputs,), decode=True, num_kv_heads=2))
    layer.init_cache(inputs.shape)
    graph, shapes, cache = nnx.split(layer, nnx.Param, ...)

    def decode(state: Any, inputs: jax.Array, step: jax.Array) -> tuple[jax.Array, Any]:
        layer = nnx.merge(graph, state)
        layer.attention_fn = attention(step)
        return layer(inputs, **call), nnx.state(layer)

    return one_by_one(decode, nnx.merge_state(filled(shapes), cache), inputs)


def linen_decode(attention: Callable[[Any], Any], inputs: np.ndarray, **call: Any) -> jax.Array:
    init = linen_module(decode=True, attention_fn=attention(0)).init
    shapes = jax.eval_shape(init, jax.random.key(0), inputs)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes["cache"])

    def decode(variables: Any, inputs: jax.Array, step: jax.Array) -> tuple[jax.Array, Any]:
        layer = linen_module(decode=True, attention_fn=attention(step))
        out, cache = layer.apply(variables, inputs, **call, mutable=["cache"])
        return out, {**variables, **cache}

    return one_by_one(decode, {**filled({"params": shapes["params"]}), "cache": zeros}, inputs)


def one_by_one(decode: Callable[..., Any], state: Any, inputs: np.ndarray) -> jax.Array:
    decode, steps = compiled(decode), []
    for step in range(LENGTH):
        out, state = decode(state, inputs[..., step : step + 1, :], step)
        steps.append(out)
    return jnp.concatenate(steps, axis=-2)


DECODERS = [
    pytest.param(functools.partial(nnx_layer, num_kv_heads=2), nnx_decode, nnx.dot_product_attention, id="nnx"),
    pytest.param(linen_layer, linen_decode, linen.dot_product_attention, id="linen"),
]


def all_at_once(make: Callable[..., Layer], inputs: Any, mask: jax.Array) -> np.ndarray:
    """The output for all positions at once, by the layer's own attention in float64."""
    apply, parameters = make(inputs)
    with jax.enable_x64(True):
        return np.asarray(compiled(apply)(float64(parameters), float64(inputs), mask=mask))


@cover(0)
@pytest.mark.parametrize(("make", "decode", "own_attention"), DECODERS)
def test_decoding_step_by_step_is_the_causal_run(make: Callable[..., Layer], decode: Any, own_attention: Any) -> None:
    (inputs,) = self_attention(2, 3)
    mask = jnp.broadcast_to(jnp.arange(LENGTH) != 3, (2, 3, 1, 1, LENGTH))
    ours = decode(lambda step: attention_fn, inputs, mask=mask)
    theirs = decode(lambda step: own_attention, inputs, mask=mask)
    assert_within_rule(ours, theirs, all_at_once(make, (inputs,), causal_mask(2, 3, dtype=bool) & mask))


@cover(0)
@pytest.mark.parametrize(("make", "decode", "own_attention"), DECODERS)
def test_decoding_in_a_window_needs_the_position(make: Callable[..., Layer], decode: Any, own_attention: Any) -> None:
    (inputs,) = self_attention(2)
    windowed = functools.partial(attention_fn, local_window_size=(3, 0))
    with pytest.raises(ValueError, match=r"`query_offset`.*`local_window_size`"):
        decode(lambda step: windowed, inputs)
    ours = decode(lambda step: functools.partial(windowed, query_offset=step), inputs)
    apply, parameters = make((inputs,))
    band = jnp.broadcast_to(np.tri(LENGTH, dtype=bool) & ~np.tri(LENGTH, k=-4, dtype=bool), (2, 1, LENGTH, LENGTH))
    assert_within_rule(ours, apply(parameters, (inputs,), mask=band), all_at_once(make, (inputs,), band))


@pytest.mark.parametrize(
    "option", [{"is_causal": True}, {"alibi_slopes": jnp.ones(HEADS)}, {"score_mod": lambda x, *_: x}]
)
def test_a_decoding_step_without_its_position_is_refused(option: Any) -> None:
    """Position 0 would be taken for it: the query would see the oldest key only, or from afar."""
    query, keys = jnp.ones((2, 1, HEADS, HEAD_DIM)), jnp.ones((2, 5, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match=f"`query_offset`.*`{next(iter(option))}`.*T=1, S=5"):
        attention_fn(query, keys, keys, **option)
    assert attention_fn(query, keys, keys, query_offset=4, **option).shape == query.shape
    assert attention_fn(query, query, query, **option).shape == query.shape
