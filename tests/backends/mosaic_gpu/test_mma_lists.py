"""Masks of pairs in the kernels by `mma.sync`: lists of tiles, and a function or bits in those seen in part."""

import dataclasses
import functools
from typing import Any

import hopper_kernels
import jax.numpy as jnp
import kernel_families
import oracle
import pytest
from cases import Case
from kernel_masks import LENGTH, call_of, chained, dense_call_of, documents, nothing, of_heads, of_packed_heads
from short_run import cover

from jflash._backends.mosaic_gpu_mma.backward_dbias import DbiasPlan
from jflash._backends.mosaic_gpu_mma.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu_mma.backward_owned import DqPlan
from jflash._backends.mosaic_gpu_mma.run import MmaCall
from jflash._backends.nvidia.walk.tile_list import LISTS

MMA = kernel_families.mma("8.0")
SQUARE = Case("bfloat16", LENGTH, LENGTH, heads=(2, 1), dims=(40, 24), batch=(2,))
run = functools.partial(hopper_kernels.run, processors=108, family=MMA, detect_races=False)

ROWS: dict[str, tuple[Any, Case, Any, dict[str, Any]]] = {
    "one kernel": (documents, SQUARE._replace(key_length=128, causal=True, batch=(1,)), FusedPlan, {}),
    "a kernel for each sum": (of_heads, SQUARE._replace(alibi=True), DqPlan, dict(deterministic=True)),
    "gradient of a bias": (documents, SQUARE._replace(bias="full", score_mod="indices", key_length=128), DbiasPlan, {}),
    "float32": (chained, SQUARE._replace(dtype="float32", query_length=70, batch=(1,)), DqPlan, {}),
    "nothing is seen": (
        nothing,
        SQUARE._replace(query_length=70, mask="full", key_length=100, sinks=True),
        FusedPlan,
        {},
    ),
}
"""A mask function, a call, a kind of plan among its backward's, and options."""
DENSE_ROWS: dict[str, tuple[Any, Case, Any, dict[str, Any]]] = {
    "dense mask": (documents, SQUARE._replace(query_length=100, causal=True, segments="unsorted"), FusedPlan, {}),
    "dense mask, a kernel for each sum": (
        of_heads,
        SQUARE._replace(query_length=200, soft_cap=1.5),
        DqPlan,
        dict(deterministic=True),
    ),
    "dense mask, gradient of a bias": (documents, SQUARE._replace(bias="full", key_length=200), DbiasPlan, {}),
}
"""Calls with masks that are arrays."""
IN_SHORT_RUN = ("one kernel",)


@cover(rest=2)
@pytest.mark.parametrize(
    "name",
    [name if name in IN_SHORT_RUN else pytest.param(name, marks=cover(0)) for name in (*ROWS, *DENSE_ROWS)],
)
def test_right(name: str):
    mask_mod, case, kind, options = (ROWS | DENSE_ROWS)[name]
    call = (dense_call_of if name in DENSE_ROWS else call_of)(mask_mod, case)
    spec, _ = hopper_kernels.canonical(call, **options)
    assert kernel_families.plan_of(MMA.plans(spec, 108)[1], kind) is not None
    hopper_kernels.assert_right(functools.partial(run, call, **options), call, MMA)


@pytest.mark.parametrize("mask_mod", [lambda b, h, q, k: k // 128 % 2 == b, of_packed_heads])
def test_decoding(mask_mod: Any):
    """Heads are packed, and CTAs share a list of what any of them sees, of which some have no tile."""
    case = Case("bfloat16", 2, 600, heads=(4, 1), dims=(64, 64), batch=(2,))
    call = dataclasses.replace(call_of(mask_mod, case), d_out=None)
    spec, operands = hopper_kernels.canonical(call)
    plan = MMA.plans(spec, 108)[0].plan
    assert plan.packed_heads == 4
    assert plan.division.pieces > 0
    # Of five tiles of 128 keys the first entry sees three and the other two, each as two of 64.
    lists = plan.arrays(MmaCall(spec, operands, MMA.ops))[LISTS]
    assert lists[:, 0, 0, 0].tolist() == [6, 4]
    oracle.assert_right(run(call), call)


@pytest.mark.parametrize("call_of", [call_of, dense_call_of])
def test_only_listed_tiles_are_visited(call_of: Any):
    """Values that no query sees are NaN. A kernel that visited their tile would add 0 * NaN to its sums."""
    call = dataclasses.replace(call_of(documents, SQUARE._replace(query_length=100, batch=(1,))), d_out=None)
    value = call.value.copy()
    value[:, 128:256] = jnp.nan
    oracle.assert_right(run(call, value=value), call)
