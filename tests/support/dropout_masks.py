"""The masks of dropout: as a backend draws them, and by the definition."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jflash

RATE = 0.25
KEY = np.asarray([3, 7], np.uint32)


def dropout_mask(
    shape: tuple[int, ...], rate: float, key: Any, implementation: str = "reference", **options: Any
) -> np.ndarray:
    """Return which probabilities `[*B, N, T, S]` are kept. With equal ones and the identity for values, the output
    tells."""
    *batch, N, T, S = shape
    out = jflash.attention(
        jnp.zeros((*batch, T, N, 1)),
        jnp.zeros((*batch, S, 1, 1)),
        jnp.broadcast_to(jnp.eye(S)[:, None], (*batch, S, 1, S)),
        dropout_rate=rate,
        dropout_key=key,
        implementation=implementation,
        **options,
    )
    return np.moveaxis(np.asarray(out) > 0, -2, -3)


def by_definition(shape: tuple[int, ...]) -> np.ndarray:
    """The mask by its definition, in numpy; that every backend draws this one, test_dropout.py shows."""
    *batch, N, T, S = shape
    golden, dropped = np.uint32(0x9E3779B9), RATE * 2**15

    def mix(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
        return bits ^ (bits >> 16)

    counted = lambda size, *axes: (np.arange(size, dtype=np.uint32) * golden).reshape(-1, *axes)
    words = np.asarray(jax.random.bits(KEY, (2,), np.uint32))
    entry = counted(math.prod(batch), 1, 1, 1)
    first = mix(words[0] ^ entry)
    second = mix(words[1] ^ mix(first + entry))
    before = mix(first + counted(N, 1, 1))
    middle = mix(second ^ before)
    query, key = np.arange(T, dtype=np.uint32)[:, None], np.arange(S, dtype=np.uint32)
    pair = lambda index: index // 16 * 8 + index % 8
    bits = before + pair(query) * golden + pair(key)
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    first = (bits ^ (bits >> 15) ^ middle) * np.uint32(0x846CA68B)
    second = (bits ^ (bits >> 13) ^ middle) * np.uint32(0xD35A2D97)
    word = np.where(query // 8 % 2 == 0, first, second)
    half = np.where(key // 8 % 2 == 0, word, word // 2**16)
    return (half % 2**15 >= dropped).reshape(shape)
