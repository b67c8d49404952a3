"""Mask functions that the kernels for NVIDIA GPUs take, of calls with 300 queries or keys at most."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import jax.numpy as jnp
import mask_functions
import numpy as np
from cases import Case

LENGTH = 300
IDS = np.zeros((2, LENGTH), np.int32)
IDS[0, 128:256], IDS[1] = -1, np.arange(LENGTH) // 70 % 2


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Documents in no order, of each entry its own. In the first one tile sees nothing, and is not seen."""
    ids = jnp.asarray(IDS)
    return (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0)


def of_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Every other 128 keys, of each head its own, and what is a multiple of 5 away."""
    return ((k // 128 + h) % 2 == 0) | ((q - k) % 5 == 0)


def chained(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Causal, among keys of one of two documents for each 100 queries, and of a kind that is read at an index that was
    read before."""
    kinds, chosen, ids = jnp.asarray([True, True, False]), jnp.asarray([[1, 0], [1, 2], [0, 1]]), jnp.asarray(IDS)[1]
    return (k <= q) & jnp.any(chosen[q // 100] == ids[k]) & kinds[jnp.clip(ids[k] + 1, 0, 2)]


def of_packed_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Other blocks of 128 keys of each entry; of each head but the first other keys, by a number that it reads."""
    return (k // 128 % 2 == jnp.asarray([0, 1])[b]) & (k % jnp.asarray([1, 2, 3, 5])[h] != h)


def nothing(b: Any, h: Any, q: Any, k: Any) -> Any:
    """No pair, which is known of each tile alone."""
    return (q < 0) & (k > q)


MASKS = dict(documents=documents, of_heads=of_heads, of_packed_heads=of_packed_heads, chained=chained, nothing=nothing)


def call_of(mask_mod: Any, case: Case) -> cases.Call:
    """The call of a case with a mask function."""
    return dataclasses.replace(cases.build(case), mask_mod=mask_mod)


def dense_call_of(mask_mod: Any, case: Case) -> cases.Call:
    """The call of a case with a mask function as an array, of one batch entry or head if it looks at none."""
    mask = mask_functions.dense(mask_mod, *case.batch, case.heads[0], case.query_length, case.key_length)
    for axis in range(2):
        if (mask == mask.take([0], axis)).all():
            mask = mask.take([0], axis)
    return dataclasses.replace(cases.build(case), mask=mask)
