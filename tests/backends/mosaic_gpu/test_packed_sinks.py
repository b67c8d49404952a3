"""Sinks of packed heads, which kernels count row by row; those of split keys when their pieces are merged."""

import dataclasses

import cases
import hopper_kernels
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_families import HOPPER, Family, mma
from short_run import cover


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
