"""Lengths that 8 does not divide and heads that 16 does not: tiles in panels, whose copies take arrays as they are."""

import dataclasses
import functools
from typing import Any

import cases
import hopper_kernels
import pytest
from cases import Case
from equations import equations
from kernel_families import TWO_KERNELS
from short_run import cover

from jflash._backends.mosaic_gpu import array_shapes, plan


@cover(every=100, rest=5)
@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "options"),
    [
        # One block of keys, and the fused backward.
        ((67, 77), (2, 1), (128, 128), dict(causal=True, offset="end")),
        ((49, 49), (2, 2), (32, 32), dict(bias="full")),
        ((133, 61), (2, 2), (64, 128), dict(window=(40, 10), lengths="both")),
        ((200, 101), (2, 2), (16, 16), dict(segments="sorted", dropout=True)),
        # Several blocks, and two kernels.
        ((70, 203), (2, 2), (256, 256), dict(causal=True, offset="end")),
        ((131, 205), (2, 2), (128, 64), dict(mask="full", lengths="both")),
        ((140, 131), (2, 2), (64, 192), dict(soft_cap=1.5, alibi=True)),
        ((67, 150), (2, 2), (8, 8), dict(score_mod="indices")),
        # Narrow panels.
        ((131, 77), (2, 2), (96, 80), dict(causal=True)),
        # Panels of several widths, with dS in the swizzle of each; and heads that they do not fill.
        ((131, 77), (2, 2), (80, 80), dict(causal=True)),
        ((144, 128), (2, 2), (72, 72), {}),
        ((64, 72), (4, 2), (70, 24), dict(causal=True, lengths="both")),
        ((133, 61), (2, 2), (104, 88), dict(segments="sorted")),
        ((72, 200), (2, 2), (40, 200), dict(window=(90, 20))),
        # Values as they are, in blocks.
        ((131, 80), (4, 2), (128, 96), dict(causal=True, offset="end")),
        # Queries that are no whole eights, and keys that are.
        ((77, 80), (2, 1), (128, 128), dict(lengths="both")),
        # Decoding, with heads as rows, and keys in splits.
        ((1, 1029), (4, 2), (128, 128), {}),
        ((1, 1032), (2, 2), (128, 128), {}),
        ((1, 1032), (4, 2), (72, 72), {}),
    ],
    ids=str,
)
def test_right(lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], options: dict[str, Any]):
    call = built(lengths, heads, dims, **options)
    assert array_shapes.forward_in_panels(hopper_kernels.canonical(call)[0])
    how: Any = dict(family=TWO_KERNELS, deterministic=True) if lengths[1] > 128 else {}
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, **how), call)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_few_queries_are_padded_for_the_backward_where_they_see_many_keys(dim: int):
    in_panels = lambda keys: array_shapes.in_panels(hopper_kernels.canonical(built((77, keys), (1, 1), (dim,) * 2))[0])
    assert in_panels(512)
    assert in_panels(520) == (dim in (64, 256))


@cover(every=2)
@pytest.mark.parametrize("lengths", [(133, 77), (64, 131)], ids=str)
def test_values_are_padded_where_many_queries_see_them(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]):
    monkeypatch.setattr(array_shapes, "_FEW_ROWS", 0)
    call = cases.of_forward(built(lengths, (2, 2), (128, 128), causal=True))
    assert not array_shapes.values_in_panels(hopper_kernels.canonical(call)[0])
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@cover(1)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (32, 128), (80, 80), (72, 88)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(lengths="both"), dict(deterministic=True)], ids=str)
def test_nothing_is_copied(dims: tuple[int, int], options: dict[str, Any]):
    """Neither operands, d_out and output before kernels, nor results after them."""
    given = {name: value for name, value in options.items() if name != "deterministic"}
    call = built((197, 203), (2, 2), dims, **given)
    kernels = {name: value for name, value in options.items() if name == "deterministic"}
    spec, _ = hopper_kernels.canonical(call, **kernels)
    assert "copies:\n  none" in plan.describe(spec, 132)
    for traced in hopper_kernels.traced(call, **kernels):
        assert not list(filter(is_copy, equations(traced.jaxpr)))


def test_padding_is_explained():
    """What is padded still: what many queries see, as products by panels take longer; heads that 8 does not divide."""
    spec, _ = hopper_kernels.canonical(built((197, 203), (2, 2), (128, 128)))
    copies = lambda **changed: plan.describe(dataclasses.replace(spec, **changed), 132).split("copies:\n")[1]
    assert copies(query_length=4001, key_length=4001) == "  value is padded from (2, 4001, 2, 128) to (2, 4008, 2, 128)"
    assert copies(head_dim=96, value_dim=96) == "  none"
    shapes = "(2, 4001, 2, 96) to (2, 4008, 2, 96)"
    assert copies(query_length=4001, key_length=4001, head_dim=96, value_dim=96).splitlines() == [
        f"  query is padded from {shapes} for the backward",
        f"  key is padded from {shapes} for the backward",
        f"  value is padded from {shapes}",
    ]
    assert copies(head_dim=72, value_dim=72) == "  none"
    of_more = copies(query_length=2000, key_length=2000, head_dim=72, value_dim=72)
    assert of_more == "  value is padded from (2, 2000, 2, 72) to (2, 2000, 2, 80)"
    of_many = copies(query_length=4000, key_length=4000, head_dim=72, value_dim=72)
    assert "query is padded from (2, 4000, 2, 72) to (2, 4000, 2, 80) for the backward" in of_many
    assert copies(head_dim=70, value_dim=64) == "\n".join(
        f"  {name} is padded from (2, {rows}, 2, 70) to (2, {rows}, 2, 80)"
        for name, rows in dict(query=197, key=203).items()
    )
    packed, _ = hopper_kernels.canonical(built((3, 4000), (8, 2), (128, 128)))
    of_packed = plan.describe(packed, 132).split("copies:\n")[1]
    assert of_packed == "  query is padded from (2, 3, 8, 128) to (2, 8, 8, 128) for the backward"


def built(rows: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], **options: Any) -> cases.Call:
    return cases.build(Case("bfloat16", *rows, heads=heads, dims=dims, batch=(2,), **options))


def is_copy(equation: Any) -> bool:
    """Whether it pads or cuts queries, keys or values; lse and delta are cut, and are small."""
    if equation.primitive.name not in ("pad", "slice"):
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    return before.ndim >= 4 and after.dtype == "bfloat16" and before.shape != after.shape
