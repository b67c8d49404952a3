"""Rows of d_out of queries that see no key, in Pallas' interpreter. Tests of whole backwards have NaN in such rows."""

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import kernel_families
import numpy as np
import pytest
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.nvidia import hidden_rows
from jflash._semantics.spec import Residuals

CASE = Case("bfloat16", 40, 64, (2, 2), (16, 16), batch=(2,), segments="sorted")
"""Segments of queries and of keys."""


@pytest.mark.parametrize("length", [3, 133])
def test_rows_of_hidden_queries_become_zeros(length: int) -> None:
    """In blocks of 128 queries, the last of which is not whole."""
    ops = kernel_families.HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True))
    spec, _ = hopper_kernels.canonical(cases.build(CASE))
    d_out, lse = np.full((2, length, 3, 24), 2, np.float32), np.zeros((2, 3, length), np.float32)
    hidden = [(0, 1, 1), (1, 0, length - 1), (1, 2, 0)]
    for batch, head, row in hidden:
        lse[batch, head, row], d_out[batch, row, head] = -np.inf, np.nan
    given = map(jnp.asarray, (d_out, lse, d_out, lse))
    got = jax.jit(lambda *arrays: hidden_rows.zeroed(spec, Residuals(*arrays), ops))(*given)
    assert not hopper_kernels.races_found()
    for batch, head, row in hidden:
        d_out[batch, row, head] = 0
    np.testing.assert_array_equal(got, d_out)
