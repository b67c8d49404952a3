"""What tests on a GPU do besides: memory and padding that hold NaN, which must reach nothing."""

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_attention import Call

from jflash import _platform
from jflash._semantics.spec import Spec

PLAIN = Spec(1, 1, 1, 1, 1, 8, 8, np.dtype(jnp.bfloat16), None, None, None, frozenset(), scale=1.0)
"""A call that a backend takes wherever it takes any."""


def served_by(backend: ModuleType) -> str:
    """Return the name of a backend, for `implementation`; skips where this machine does not run it."""
    name, reason = backend.__name__.rpartition(".")[2], backend.unsupported(PLAIN, _platform.current())
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


def poison() -> None:
    """Fill memory that the allocator may hand out again."""
    filled = [jnp.full(2**size, jnp.nan, jnp.float32) for size in range(8, 24)]
    jax.block_until_ready(filled)


def with_nan_in_padding(call: Call) -> Call:
    """The same call, NaN where lengths say that nothing is."""

    def planted(array, lengths):
        if lengths is None:
            return array
        index = np.arange(array.shape[-3])
        inside = index < np.asarray(lengths)[..., None]
        return np.where(inside[..., None, None], array, np.asarray(np.nan, array.dtype))

    queries, keys = call.query_seq_lengths, call.key_value_seq_lengths
    return dataclasses.replace(
        call,
        query=planted(call.query, queries),
        d_out=planted(call.d_out, queries),
        key=planted(call.key, keys),
        value=planted(call.value, keys),
    )
