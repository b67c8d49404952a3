"""The Hopper forward of calls whose values are their keys, in the interpreter: both products read one tile."""

import dataclasses
import functools
from typing import Any

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_families import HOPPER
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _autodiff
from jflash._backends.mosaic_gpu import plan
from jflash._semantics.spec import Spec

DECODING = Case("bfloat16", 1, 200, heads=(16, 1), dims=(576, 576), batch=(2,))
SEVERAL = DECODING._replace(query_length=3, causal=True, offset="end")


def with_one_array(case: Case) -> tuple[Call, dict[str, Any]]:
    """A call whose values are its keys, and these two arguments: one array."""
    call = cases.of_forward(cases.build(case))
    array = jnp.asarray(call.key)
    return dataclasses.replace(call, value=call.key), dict(key=array, value=array)


CALLS: dict[str, tuple[Case, int, int]] = {
    "decoding": (DECODING, 1, 1),
    "512 columns, lengths": (SEVERAL._replace(dims=(512, 512), lengths="keys", heads=(8, 1)), 1, 1),
    "splits": (DECODING._replace(key_length=700, batch=(1,), dtype="float16", lengths="keys", sinks=True), 9, 2),
    "two blocks": (SEVERAL._replace(query_length=2, heads=(128, 1), batch=(1,), soft_cap=3.0), 1, 1),
    "heads apart": (
        Case(
            "bfloat16", 40, 150, heads=(2, 2), dims=(512, 512), batch=(1,), bias="full", dropout=True, window=(90, 20)
        ),
        *(1, 1),
    ),
    "keys past the end": (DECODING._replace(key_length=257), 1, 1),
}


@pytest.mark.parametrize(
    ("case", "processors", "splits"),
    [pytest.param(*row, marks=[cover(0)] * (name != "decoding")) for name, row in CALLS.items()],
    ids=CALLS,
)
def test_right(case: Case, processors: int, splits: int):
    call, one = with_one_array(case)
    kernel = plan.plan_forward(hopper_kernels.canonical(call, **one)[0], processors)
    assert kernel.plan.shares_tiles
    assert kernel.plan.division.each == splits
    oracle.assert_right(hopper_kernels.run(call, processors, **one), call)


PAGES: dict[str, tuple[Case, int]] = {
    "decoding": (DECODING, 16),
    "several queries": (SEVERAL._replace(dims=(512, 512), heads=(8, 1)), 64),
    "in pieces": (DECODING._replace(key_length=900), 8),
}


@cover(0)
@pytest.mark.parametrize(("case", "page_size"), PAGES.values(), ids=PAGES)
def test_pages(case: Case, page_size: int):
    """Pages hold NaN past each length, and all of them are read as values too."""
    call, _ = with_one_array(case)
    call = paged.with_lengths(call)
    arguments = paged.paginate(call, page_size)
    cache = jnp.asarray(arguments["key"])
    arguments |= dict(key=cache, value=cache)
    kernel = plan.plan_forward(hopper_kernels.canonical(call, **arguments)[0], 132)
    assert kernel.plan.shares_tiles
    assert kernel.plan.shares is not None
    oracle.assert_right(hopper_kernels.run(call, **arguments), call)


@cover(0)
def test_part_of_all_keys():
    """The output of a partial call stays float32."""
    call, one = with_one_array(DECODING._replace(key_length=130))
    spec, operands = hopper_kernels.canonical(call, **one)
    spec = dataclasses.replace(spec, partial=True)
    kernel, ops = plan.plan_forward(spec, 1), HOPPER.interpreter(plgpu.InterpretGPUParams(detect_races=True))
    assert kernel.plan.shares_tiles
    out, lse = HOPPER.call.forward(kernel, operands, ops)
    assert not hopper_kernels.races_found()
    assert out.dtype == jnp.float32
    oracle.assert_right(oracle.Results(np.asarray(out), np.asarray(lse.swapaxes(1, 2)), {}), call)


def canonical_spec(**arguments: Any) -> Spec:
    return hopper_kernels.canonical_arguments(query=jnp.zeros((1, 2, 4, 576), jnp.bfloat16), **arguments)[0]


def test_one_array_or_two():
    """It is one if the arguments are the same object, and not where equal ones come apart."""
    cache = jnp.zeros((1, 300, 1, 576), jnp.bfloat16)
    apart = dict(key=cache, value=cache.copy())
    for arguments, expected in ((dict(key=cache, value=cache), True), (apart, False)):
        spec = canonical_spec(**arguments)
        assert spec.value_is_key == expected
        assert plan.plan_forward(spec, 132).plan.shares_tiles == expected
    found: list[bool] = []
    jax.eval_shape(lambda x: found.append(canonical_spec(key=x, value=x).value_is_key) or x, cache)
    assert found == [True]


def test_tangents_of_values_are_not_those_of_keys():
    """The kernel that sums them in the place of values reads both."""
    cache = jnp.zeros((1, 300, 1, 576), jnp.bfloat16)
    spec = canonical_spec(key=cache, value=cache)
    assert not plan.plan_tangent(spec, frozenset({"value"}), 132).plan.shares_tiles


@pytest.mark.parametrize("is_pair_of_one", [True, False])
def test_ragged(monkeypatch: pytest.MonkeyPatch, is_pair_of_one: bool):
    """A pair of pages that is one array, beside one that is not."""
    step = paged.ragged([(3, 30), (1, 7)], 8, heads=(4, 1), dims=(32, 32))
    keys, values = map(jnp.asarray, step.arguments["kv_pages"])
    found: list[bool] = []
    attend = _autodiff.attend

    def seen(choice: Any, spec: Spec, *others: Any) -> Any:
        found.append(spec.value_is_key)
        return attend(choice, spec, *others)

    monkeypatch.setattr(_autodiff, "attend", seen)
    arguments = step.arguments | dict(kv_pages=(keys, keys if is_pair_of_one else values))
    attend_all = functools.partial(jflash.ragged_paged_attention, implementation="xla", return_residual=True)
    calls = [dataclasses.replace(call, value=call.key) if is_pair_of_one else call for call in step.calls]
    paged.assert_ragged_right(attend_all(**arguments), step._replace(calls=calls))
    assert found == [is_pair_of_one]
