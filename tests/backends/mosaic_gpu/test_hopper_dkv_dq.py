"""The backward in one kernel whose warpgroups hold one sum each, in Pallas' interpreter: right, and free of races."""

import functools

import cases
import hopper_kernels
import pytest
from cases import Case
from kernel_families import plan_of
from on_hardware import with_nan_in_padding
from short_run import cover

from jflash._backends.mosaic_gpu import plan
from jflash._backends.mosaic_gpu.backward_dkv_dq import DkvDqPlan

OPTIONS = [
    dict(causal=True, offset="end"),
    dict(window=(40, 90), lengths="both", sinks=True),
    dict(soft_cap=40.0, segments="sorted", dropout=True),
    dict(bias="full", mask="full"),
    dict(bias="keys", score_mod="indices"),
    dict(dims=(100, 64)),
]


def slow(*row: object):
    return pytest.param(*row, marks=cover(0))


def built(query_length: int, key_length: int, heads: tuple[int, int], **options):
    given = dict(dims=(128, 128), batch=(2,)) | options
    return cases.build(Case("float32", query_length, key_length, heads=heads, **given))


def kernel(call, **options):
    return plan_of(plan.plan_backward(hopper_kernels.canonical(call, **options)[0], 132), DkvDqPlan)


@cover(rest=3)
@pytest.mark.parametrize("options", [OPTIONS[0], *map(slow, OPTIONS[1:])], ids=str)
def test_one_block_of_keys(options: dict):
    """Races are looked for: no other block adds to what this one adds to."""
    call = built(70, 60, (2, 1), batch=(1,), **options)
    assert kernel(call) is not None
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@cover(0, rest=4)
@pytest.mark.parametrize(
    ("lengths", "heads", "options"),
    [
        ((130, 200), (4, 2), dict(causal=True, lengths="keys")),
        *[((70, 150), (2, 2), options) for options in OPTIONS],
        # Heads that share keys are in head groups, whose dK and dV are summed afterwards.
        ((260, 70), (8, 1), {}),
    ],
    ids=str,
)
def test_several_blocks(lengths: tuple[int, int], heads: tuple[int, int], options: dict):
    """Padding holds NaN, which must not reach dQ by way of the block's keys."""
    call = built(*lengths, heads, **options)
    assert kernel(call) is not None
    run = functools.partial(hopper_kernels.run, with_nan_in_padding(call), detect_races=False)
    hopper_kernels.assert_right(run, call)


def test_room_behind_the_last_query():
    """A tile may begin at the last query, and is added whole."""
    call = built(64, 64, (1, 1))
    found = kernel(call)
    assert found is not None
    assert found.dq_acc[3] - call.query.shape[-3] >= 64 - 1


@pytest.mark.parametrize(
    ("options", "asked", "is_taken"),
    [
        ({}, {}, True),
        ({}, dict(precision="highest"), True),
        # Every sum has one order.
        ({}, dict(deterministic=True), False),
        # The kernel of dQ sums a parameter's gradient.
        (dict(alibi=True), {}, False),
        # The fused kernel fits.
        (dict(dims=(64, 64)), {}, False),
        # Half of the columns is no whole number of swizzles.
        (dict(dims=(96, 96)), {}, False),
    ],
    ids=str,
)
def test_which_calls_take_it(options: dict, asked: dict, is_taken: bool):
    assert (kernel(built(300, 300, (2, 2), **options), **asked) is not None) == is_taken
