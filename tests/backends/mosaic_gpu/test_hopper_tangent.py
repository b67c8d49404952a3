"""Forward mode of the Hopper kernels in Pallas' interpreter: right, and free of races, over a product of features."""

import dataclasses

import cases
import hopper_kernels
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from kernel_values import INTERPRETED
from short_run import cover

from jflash import _tuning

MOVING = {
    "all": None,
    "query": ("query",),
    "key and value": ("key", "value"),
    "value": ("value",),
    "what shapes logits": ("scale", "bias", "alibi_slopes", "sinks"),
}
"""The operands that move, where the call has them."""
# Which cases the product has depends on the order of the keys, which those given first keep.
FEATURES = {
    **dict.fromkeys(("dtype", "query_length")),
    "key_length": (17, 131, 200),
    "heads": None,
    "dims": ((40, 24), (64, 64), (33, 100), (192, 128), (80, 200), (256, 256)),
} | INTERPRETED
CASES = [Case(batch=(2,), **row) for row in cases.product(FEATURES, 2)]
ROWS = [(case, list(MOVING)[index % len(MOVING)] if index % 2 else "all") for index, case in enumerate(CASES)]


def forms(case: Case) -> int:
    """Return how many of the options that decide the loop a case has."""
    return sum(bool(getattr(case, name)) for name in ("score_mod", "bias", "mask", "dropout"))


IN_SHORT_RUN = max((row for row in ROWS if row[1] == "all"), key=lambda row: forms(row[0]))


def along(call: cases.Call, moving: str) -> dict[str, np.ndarray]:
    """Tangents of those operands that the call has; of all, if of those it has none."""
    every = oracle.draw_tangents(call)
    names = MOVING[moving] or every
    return {name: tangent for name, tangent in every.items() if name in names} or every


@cover(rest=9)
@pytest.mark.parametrize(
    ("case", "moving"),
    [pytest.param(*row, marks=() if row == IN_SHORT_RUN else cover(0)) for row in ROWS],
    ids=str,
)
def test_right(case: Case, moving: str):
    call = cases.build(case)
    hopper_kernels.assert_tangents_right(call, along(call, moving))


def with_logits(call: cases.Call, size: float, shared: float) -> cases.Call:
    """The call with peaked logits, or with keys that have a mean in common."""
    mean = shared * np.random.default_rng(1).standard_normal(call.key.shape[-1])
    query, key = call.query * size, call.key + mean
    return dataclasses.replace(call, query=query.astype(call.query.dtype), key=key.astype(call.key.dtype))


@cover(every=12, rest=6)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("size", "shared"), [(16, 0), (64, 0), (1, 10), (4, 3)])
def test_about_the_mean(dtype: str, size: float, shared: float):
    """Where a few keys have all the weight, or all have much in common, P tS is large beside what it should leave."""
    call = with_logits(cases.build(Case(dtype, 70, 390, (2, 1), (64, 64), ())), size, shared)
    hopper_kernels.assert_tangents_right(call, along(call, "all"))


@cover(0, rest=2)
@pytest.mark.parametrize(
    ("dtype", "dims", "options"),
    [
        ("bfloat16", (64, 64), dict(causal=True)),
        ("bfloat16", (40, 256), dict(bias="full", lengths="both")),
        ("float32", (64, 64), dict(window=(90, 10), offset="each")),
        ("bfloat16", (192, 128), dict(dropout=True, segments="sorted")),
    ],
    ids=str,
)
def test_a_part(dtype: str, dims: tuple[int, int], options: dict):
    """The tangent of a part of a call's keys or queries is float32."""
    call = cases.build(Case(dtype, 131, 200, heads=(2, 1), dims=dims, batch=(2,), **options))
    moving = along(call, "all")
    got = hopper_kernels.run_tangents(call, moving, partial=True)
    assert got.out.dtype == jnp.float32
    rounded = got._replace(out=got.out.astype(call.query.dtype))
    oracle.assert_tangents_right(rounded, call, moving, as_tf32=dtype == "float32")


@cover(0, rest=3)
@pytest.mark.parametrize("place", range(1, 5))
@pytest.mark.parametrize(("dim", "options"), [(64, dict(causal=True)), (128, dict(bias="full", lengths="both"))])
def test_any_tiles(dim: int, options: dict, place: int):
    """All tiles are right, also those that only a search on some device would choose."""
    call = cases.build(Case("bfloat16", 131, 200, (2, 1), (dim, dim), (1,), **options))
    spec, _ = hopper_kernels.canonical(call)
    moving = along(call, "all")
    with _tuning.trying({}) as trial:
        hopper_kernels.plan.plan_tangent(spec, frozenset(moving), 132)
    answers = {key: tiles[min(place, len(tiles) - 1)] for key, tiles in trial.asked.items()}
    with _tuning.trying(answers):
        hopper_kernels.assert_tangents_right(call, moving)
