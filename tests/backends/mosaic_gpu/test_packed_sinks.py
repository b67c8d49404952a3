"""Sinks of packed heads, which kernels count row by row; those of split keys when their pieces are merged."""

import dataclasses

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER, Family, mma
from short_run import cover

from jflash._backends.mosaic_gpu.run import HopperForward
from jflash._backends.nvidia import merge
from jflash._backends.nvidia.finish import finish_forward
from jflash._backends.nvidia.walk.work_items import Splits


@pytest.mark.parametrize("family", [HOPPER, pytest.param(mma("8.0"), marks=cover(0))], ids=["hopper", "mma"])
@pytest.mark.parametrize(
    ("processors", "key_length"), [(1, 200), *(pytest.param(132, length, marks=cover(0)) for length in (1100, 2700))]
)
def test_decoding(family: Family, processors: int, key_length: int):
    """Heads that share keys stay packed, so keys are read once for all of them; an entry without keys has output 0."""
    case = Case("bfloat16", 2, key_length, heads=(4, 2), dims=(64, 64), batch=(2,), sinks=True, causal=True)
    call = cases.of_forward(cases.build(case._replace(offset="each", lengths="keys")))
    # Far below all logits, and far above.
    call = dataclasses.replace(call, sinks=np.array([-300, 0, 2, 300], np.float32))
    spec, _ = hopper_kernels.canonical(call)
    plan = family.plans(spec, processors)[0].plan
    assert plan.packed_heads == 2
    assert (plan.division.pieces > 0) == (processors > 1)
    oracle.assert_right(hopper_kernels.run(call, processors, family=family), call)


@pytest.mark.parametrize("sink", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("splits", [3, 9])
def test_any_sink_of_split_keys(splits: int, sink: float):
    """A sink may be far above or below all logits, and a row may see no key. Nine splits are three warpgroups'."""
    numbers = np.random.default_rng(0)
    spec, operands = hopper_kernels.canonical(
        cases.build(Case("float32", 2, 24, heads=(4, 2), dims=(16, 16), batch=(1,), sinks=True))
    )
    plan = dataclasses.replace(HOPPER.plans(spec, 1)[0].plan, division=Splits(1, 1, splits))
    out = numbers.standard_normal((splits, 1, 2, 4, 16)).astype(np.float32)
    lse = numbers.standard_normal((splits, 1, 2, 4)).astype(np.float32)
    lse[..., 0], out[:, :, :, 0] = -np.inf, 0
    operands = operands._replace(sinks=jnp.full((1, 4), sink))
    pieces = jnp.array(out[:, 0]), jnp.pad(lse[:, 0], ((0, 0), (0, 0), (0, plan.tile.rows - 4)))
    call = HopperForward(spec, operands, HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True)))
    assert merge.results_of_forward(plan) == {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in zip(merge.PIECES, pieces, strict=True)
    }
    made = jax.jit(lambda *pieces: merge.merged(plan, call, dict(zip(merge.PIECES, pieces, strict=True))))(*pieces)
    got, got_lse = finish_forward(plan, jax.block_until_ready(made))
    assert not hopper_kernels.races_found()
    weights = np.exp(lse.astype(np.float64))
    total = weights.sum(0) + np.exp(sink)
    want = (weights[..., None] * out).sum(0) / total[..., None]
    want_lse = np.where(weights.sum(0) == 0, -np.inf, np.log(total))
    # Rows are queries of two heads in turn.
    unpacked = lambda rows: rows.reshape(1, 2, 2, 2, *rows.shape[3:]).swapaxes(2, 3).reshape(1, 4, 2, *rows.shape[3:])
    np.testing.assert_allclose(got.swapaxes(1, 2), unpacked(want), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got_lse, unpacked(want_lse), rtol=1e-5)
