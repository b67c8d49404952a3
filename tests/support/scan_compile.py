"""Compiles the gradient of a scan over attention for an H200, without one, and prints how often it calls each kernel.

python scan_compile.py
"""

from __future__ import annotations

import collections
import json
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"

import h200
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import jflash

TOKENS, HEADS, HEAD_DIM, LAYERS = 512, 2, 64, 3


def layer(inputs: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
    """What attention gives is read by the backward of attention, and by that of the product behind it."""
    attended = jflash.attention(inputs, inputs, inputs, is_causal=True, implementation="mosaic_gpu")
    return inputs + (attended.reshape(TOKENS, -1) @ weights).reshape(inputs.shape), None


def main() -> None:
    """Count the calls in the compiled program."""
    h200.is_the_target()
    sharding = h200.over(1, PartitionSpec())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    width = HEADS * HEAD_DIM

    def loss(inputs: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(layer, inputs, weights)[0].astype(jnp.float32)).mean()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    text = step.lower(array(TOKENS, HEADS, HEAD_DIM), array(LAYERS, width, width)).compile().as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    names = [re.search(r"/jflash_([a-z_]+?)_\d", line) for line in calls]
    print(json.dumps(collections.Counter("unknown" if name is None else name[1] for name in names)))


if __name__ == "__main__":
    main()
