"""Kernels read lengths and offsets of any values, and clamp them: a pass over them before would be a kernel more."""

import dataclasses
import unittest.mock

import cases
import hopper_kernels
import numpy as np
import oracle
import pytest
from cases import Case
from hopper_kernels import canonical
from kernel_families import HOPPER, Family, mma
from plain_attention import Call
from short_run import cover

from jflash._semantics.spec import Operands, Spec

ANY = np.array([-(2**31), 2**31 - 1, 97], np.int32)
GIVEN = dict(query_offset=ANY, query_lengths=ANY[::-1], key_lengths=ANY)
ROWS = {
    "square": Case("bfloat16", 136, 144, heads=(2, 1), dims=(64, 64), batch=(3,), lengths="both"),
    "decoding": Case("bfloat16", 2, 140, heads=(2, 1), dims=(64, 64), batch=(3,), lengths="keys"),
    "offsets": Case("bfloat16", 2, 140, (2, 1), (64, 64), (3,), causal=True, window=(99, 0), offset="each"),
    "many splits": Case("bfloat16", 1, 1100, heads=(2, 1), dims=(64, 64), batch=(3,), lengths="keys"),
}


@pytest.mark.parametrize("family", [HOPPER, pytest.param(mma("8.0"), marks=cover(0))], ids=["hopper", "mma"])
@pytest.mark.parametrize("name", [name if name == "decoding" else pytest.param(name, marks=cover(0)) for name in ROWS])
def test_any_values(family: Family, name: str) -> None:
    case = ROWS[name]
    drawn = cases.build(case) if name == "square" else cases.of_forward(cases.build(case))
    limits = (
        ("query_offset", GIVEN["query_offset"].clip(-(2**29), 2**29)),
        ("query_seq_lengths", GIVEN["query_lengths"].clip(0, case.query_length)),
        ("key_value_seq_lengths", GIVEN["key_lengths"].clip(0, case.key_length)),
    )
    in_range = {argument: values for argument, values in limits if isinstance(getattr(drawn, argument), np.ndarray)}
    call = dataclasses.replace(drawn, **in_range)

    def out_of_range(_: Call) -> tuple[Spec, Operands]:
        spec, operands = canonical(call)
        return spec, operands._replace(**{operand: GIVEN[operand] for operand in GIVEN if operand in spec.operands})

    with unittest.mock.patch.object(hopper_kernels, "canonical", out_of_range):
        oracle.assert_right(hopper_kernels.run(call, family=family), call)
