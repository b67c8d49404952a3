"""Lengths and offsets whose values are not known before the call: what is out of range is as good as its end."""

from typing import Any

import jax
import numpy as np
import pytest
from operands import assert_same, normal
from refusals import skip_refused

import jflash

KEYS, QUERIES = 40, 24
RANGES = {"query_seq_lengths": (0, QUERIES), "key_value_seq_lengths": (0, KEYS), "query_offset": (-(2**29), 2**29)}
ANY = np.array([-(2**31), -1, 9, KEYS + 1, 2**31 - 1], np.int32)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", RANGES)
def test_any_length(backend: str, name: str, dtype: str) -> None:
    """Output, log-sum-exp and gradients."""
    batch, heads, dim = len(ANY), 2, 8
    arrays = dict(
        query=normal(0, batch, QUERIES, heads, dim),
        key=normal(1, batch, KEYS, heads, dim),
        value=normal(2, batch, KEYS, heads, dim),
    )
    skip_refused(backend, **arrays, **{name: ANY.clip(*RANGES[name])}, is_causal=True)

    @jax.jit
    def of(lengths: Any) -> Any:
        def attend(arrays: Any) -> Any:
            given = arrays | {name: lengths}
            options = dict(is_causal=True, local_window_size=(30, 0), return_residual=True)
            return jflash.attention(**given, **options, implementation=backend)

        results, pull_back = jax.vjp(attend, arrays)
        return results, pull_back(results)

    with jax.enable_x64(dtype == "int64"):
        wide = ANY.astype(dtype) * (2**20 if dtype == "int64" else 1)
        assert_same(of(wide), of(wide.clip(*RANGES[name])))
