"""The Hopper kernels in Pallas' interpreter for a part of a call, as tests/backends/test_partial.py has it."""

import dataclasses

import cases
import hopper_kernels
import oracle
import parts
import pytest
from cases import Case
from short_run import cover

from jflash._backends.mosaic_gpu import forward_schedule
from jflash._backends.mosaic_gpu.forward_schedule import Choice


@cover(0, rest=3)
@pytest.mark.parametrize(
    ("dtype", "dims", "options"),
    [
        ("bfloat16", (64, 64), dict(causal=True)),
        ("bfloat16", (40, 64), dict(bias="full", lengths="both")),
        ("bfloat16", (128, 128), dict(window=(90, 10), offset="each")),
        ("bfloat16", (256, 256), dict(causal=True)),
        ("bfloat16", (64, 64), dict(causal=True, dropout=True)),
        ("bfloat16", (192, 128), dict(dropout=True, segments="sorted")),
        ("float32", (64, 64), dict(causal=True)),
        ("float32", (96, 40), dict(bias="full", lengths="both", dropout=True)),
        ("float32", (128, 128), dict(window=(90, 10), offset="each")),
    ],
    ids=str,
)
def test_several_items_a_cta_of_a_part(
    monkeypatch: pytest.MonkeyPatch, dtype: str, dims: tuple[int, int], options: dict
):
    """A part's output leaves from registers, while the next queries come."""
    planned = lambda one, *_: Choice(dataclasses.replace(one, items_per_cta=2), 0.0)
    monkeypatch.setattr(forward_schedule, "choose", planned)
    call = cases.of_forward(cases.build(Case(dtype, 260, 64, heads=(2, 2), dims=dims, batch=(2,), **options)))
    run = lambda **precision: parts.run(call, *hopper_kernels.functions(), **precision)
    hopper_kernels.assert_right(run, call)


@cover(0)
def test_keys_of_a_part_in_several_splits():
    case = Case("bfloat16", 2, 2200, heads=(4, 2), dims=(24, 24), batch=(2,), lengths="keys")
    call = cases.of_forward(cases.build(case))
    oracle.assert_right(parts.run(call, *hopper_kernels.functions()), call)
