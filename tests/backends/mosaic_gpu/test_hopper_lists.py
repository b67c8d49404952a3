"""Masks of pairs in the Hopper kernels: lists of tiles, and a function or bits in those that are seen in part."""

import dataclasses
import functools
from typing import Any

import hopper_kernels
import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import oracle
import pytest
from array_ref import ArrayRef
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER
from kernel_masks import IDS, LENGTH, call_of, chained, dense_call_of, documents, nothing, of_heads, of_packed_heads
from short_run import cover

from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu.backward_dkv_dq import DkvDqPlan
from jflash._backends.mosaic_gpu.backward_dq import DqPlan
from jflash._backends.mosaic_gpu.backward_fused import FusedPlan
from jflash._backends.mosaic_gpu.backward_short import ShortPlan
from jflash._backends.mosaic_gpu.backward_wide_plan import WidePlan
from jflash._backends.nvidia.prepared import Prepared
from jflash._backends.nvidia.tile import mask_mod_reads
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord


@dataclasses.dataclass(frozen=True)
class Row:
    """A call, and the kernels that serve it."""

    mask_mod: Any
    case: Case
    plan: Any
    """The kind of the backward's first plan."""
    processors: int = 132
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    call_of: Any = call_of


SQUARE = Case("bfloat16", LENGTH, LENGTH, heads=(2, 1), dims=(40, 24), batch=(2,))
ROWS = {
    "one kernel": Row(documents, SQUARE._replace(query_length=200, key_length=128, causal=True, batch=(1,)), FusedPlan),
    "two kernels": Row(of_heads, SQUARE._replace(alibi=True), DqPlan, options=dict(deterministic=True)),
    "several blocks of a CTA": Row(documents, SQUARE._replace(query_length=200, soft_cap=1.5), ShortPlan, processors=1),
    "wide heads": Row(documents, SQUARE._replace(dims=(264, 40), query_length=140, batch=(1,)), WidePlan),
    "float32": Row(chained, SQUARE._replace(dtype="float32", dims=(128, 128), key_length=60, batch=(1,)), DkvDqPlan),
    "gradient of a bias": Row(
        documents,
        SQUARE._replace(bias="full", score_mod="indices", query_length=140, batch=(1,), key_length=128),
        FusedPlan,
    ),
    "nothing is seen": Row(nothing, SQUARE._replace(query_length=70, key_length=100, sinks=True), FusedPlan),
    "dense mask": Row(
        documents,
        SQUARE._replace(query_length=200, key_length=128, segments="unsorted", causal=True),
        FusedPlan,
        call_of=dense_call_of,
    ),
    "dense mask, two kernels": Row(
        of_heads,
        SQUARE._replace(query_length=200, soft_cap=1.5),
        DqPlan,
        options=dict(deterministic=True),
        call_of=dense_call_of,
    ),
    "dense mask, wide heads": Row(
        documents,
        SQUARE._replace(dims=(264, 40), query_length=140, batch=(1,), causal=True),
        WidePlan,
        call_of=dense_call_of,
    ),
    "dense mask, gradient of a bias": Row(
        documents,
        SQUARE._replace(bias="full", query_length=140, batch=(1,), key_length=128),
        FusedPlan,
        call_of=dense_call_of,
    ),
}
IN_SHORT_RUN = ("one kernel",)


@cover(1)
@pytest.mark.parametrize("keys_first", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("name", ["chained", "BigBird", "images in text", "odd heads causal"])
def test_program(name: str, keys_first: bool):
    """What a kernel evaluates of a tile, of numbers that it reads itself, is the function."""
    function = chained if name == "chained" else mask_functions.families(LENGTH)[name]
    arrays = {name: jnp.zeros((2, LENGTH, 4, 8), jnp.bfloat16) for name in ("query", "key", "value")}
    spec, operands = hopper_kernels.canonical_arguments(**arrays, mask_mod=function)
    ops = HOPPER.interpreter(plgpu.InterpretGPUParams())
    refs = {name: ArrayRef(array) for name, array in Prepared(spec, operands, ops).others.items()}
    inputs = KernelInputs(spec, ops, refs, keys_first=keys_first)
    at = TileCoord(*map(jnp.int32, (1, 3, 192, 128)))
    got = jax.jit(lambda: mask_mod_reads.visible(inputs, at, inputs.tile(at, (64, 64), {})))()
    want = mask_functions.dense(function, 2, 4, LENGTH, LENGTH)[1, 3, 192:256, 128:192]
    np.testing.assert_array_equal(np.broadcast_to(got, (64, 64)), want.T if keys_first else want)


@cover(rest=3)
@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT_RUN else pytest.param(name, marks=cover(0)) for name in ROWS]
)
def test_right(name: str):
    row = ROWS[name]
    call = row.call_of(row.mask_mod, row.case)
    spec, _ = hopper_kernels.canonical(call, **row.options)
    assert isinstance(HOPPER.plans(spec, row.processors)[1][0].plan, row.plan)
    run = functools.partial(hopper_kernels.run, call, row.processors, **row.options)
    hopper_kernels.assert_right(run, call)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: k // 128 % 2 == b,
        *(pytest.param(function, marks=cover(0)) for function in (of_packed_heads, nothing)),
    ],
)
def test_decoding(mask_mod: Any):
    """Heads are packed, and CTAs share a list, of which some have no tile."""
    case = Case("bfloat16", 2, 1100, heads=(4, 1), dims=(64, 64), batch=(2,))
    call = dataclasses.replace(call_of(mask_mod, case), d_out=None)
    plan = HOPPER.plans(hopper_kernels.canonical(call)[0], 132)[0].plan
    assert plan.packed_heads == 4
    assert plan.division.pieces > 0
    oracle.assert_right(hopper_kernels.run(call), call)


@cover(0)
def test_tangents():
    call = call_of(documents, SQUARE._replace(query_length=200))
    hopper_kernels.assert_tangents_right(call, oracle.draw_tangents(call))


def test_only_listed_tiles_are_visited():
    """Values that no query sees are NaN: a kernel that visited their tile would add 0 * NaN to its sums. The array that
    is read has a batch axis, as `jax.vmap` makes one."""
    call = call_of(documents, SQUARE._replace(query_length=100, dims=(8, 8)))
    call = dataclasses.replace(call, d_out=None)
    _, of_entries = hopper_kernels.canonical(call)
    one = lambda b, h, q, k: (jnp.asarray(IDS[0])[q] == jnp.asarray(IDS[0])[k]) & (jnp.asarray(IDS[0])[q] >= 0)
    spec, operands = hopper_kernels.canonical(dataclasses.replace(call, mask_mod=one))
    arrays = tuple(jnp.asarray(IDS) for _ in operands.mask_mod_arrays)
    value = operands.value.at[0, 128:256].set(jnp.nan)
    operands = operands._replace(mask_mod_arrays=arrays, coverage=of_entries.coverage, value=value)
    forward, _ = hopper_kernels.functions()
    out, lse = forward(spec.resized(operands), operands)
    got = oracle.Results(out, lse.transpose(0, 2, 1), {})
    oracle.assert_right(got, call)


def test_only_listed_tiles_of_a_dense_mask_are_visited():
    call = dense_call_of(documents, SQUARE._replace(query_length=100, dims=(8, 8), batch=(1,)))
    call = dataclasses.replace(call, d_out=None)
    value = call.value.copy()
    value[0, 128:256] = np.nan
    oracle.assert_right(hopper_kernels.run(dataclasses.replace(call, value=value)), call)


FEW, MANY = jnp.arange(9), jnp.arange(300)
REFUSED = {
    "up to 16 neighbours, by its index: sort": lambda b, h, q, k: jnp.sort(FEW)[q] < k,
    "up to 16 neighbours, by its index: eq": lambda b, h, q, k: jnp.any(k == MANY),
    "computes floor": lambda b, h, q, k: jnp.floor(q / 3) > k,
    "computes in uint8": lambda b, h, q, k: q.astype(jnp.uint8) > k.astype(jnp.uint8),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str):
    arrays = {name: jnp.zeros((2, 40, 2, 8), jnp.bfloat16) for name in ("query", "key", "value")}
    spec, _ = hopper_kernels.canonical_arguments(**arrays, mask_mod=REFUSED[reason])
    refusal = mosaic_gpu.unsupported_call(spec)
    assert refusal is not None
    assert reason in refusal
