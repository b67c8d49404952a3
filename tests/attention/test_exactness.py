"""Outputs, log-sum-exps and every gradient against float64, over the product of features, dtypes and shapes."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cases
import jax
import oracle
import pytest
import score_mod_tables
from cases import Case
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _dispatch

FEWER, QUICK, SHORT, LONG = map(cases.all_cases, (cases.FEWER, cases.QUICK, cases.SHORT, cases.LONG))
EMULATED_FEWER, EMULATED_QUICK, EMULATED_SHORT, EMULATED_LONG = map(
    cases.all_cases, (cases.EMULATED_FEWER, cases.EMULATED_QUICK, cases.EMULATED, cases.EMULATED_LONG)
)
CASES = list(dict.fromkeys([*FEWER, *QUICK, *SHORT, *LONG]))
EMULATED = list(dict.fromkeys([*EMULATED_FEWER, *EMULATED_QUICK, *EMULATED_SHORT, *EMULATED_LONG]))
# The definition has no tiles; cuDNN takes few of these cases, and has tests of its own.
IN_FULL = dict.fromkeys(_dispatch.BACKENDS, CASES) | {"metal": EMULATED, "reference": [*FEWER, *QUICK], "cudnn": []}
# The options of which QUICK has more kinds than FEWER.
KINDS = ("bias", "mask", "offset", "window", "lengths", "segments")
IN_SHORT_RUN = {
    # How every two options meet, each kind of them, and several tiles (test_tiles has more). Widths are all one to XLA.
    "xla": {*FEWER, *cases.once(QUICK, KINDS), *cases.once(LONG, ["causal"])},
    # Each option once, heads in a part of a block of columns and in several, and several tiles.
    "metal": {
        *cases.once(EMULATED_FEWER),
        *(next(case for case in EMULATED_SHORT if case.dims == dims) for dims in ((1, 1), (33, 256))),
        *cases.once(EMULATED_LONG, ["causal"]),
    },
    # The definition is short, and what others are held against in many tests; Hopper kernels have tests of their own.
    "reference": set(cases.once(FEWER)),
    "mosaic_gpu": set(cases.once(FEWER)),
    "mosaic_gpu_mma": set(cases.once(FEWER)),
    "cudnn": set[Case](),
}
NOTHING = [
    dict(query_length=0),
    dict(key_length=0),
    dict(query_length=0, key_length=0),
    dict(batch=(0,)),
    dict(batch=(2, 0)),
]


build = functools.lru_cache(maxsize=2)(cases.build)
"""Each backend in turn takes the same call, whose truth and tolerances are then known."""


def assert_exact(attention: Callable[..., Any], case: Case, *, by_rows: bool = True):
    call = build(case)
    oracle.assert_right(oracle.run(attention, call), call, by_rows=by_rows)


@cover(rest=3)
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, marks=() if case in IN_SHORT_RUN[backend] else cover(0))
        for case, backend in itertools.product([*CASES, *EMULATED], _dispatch.BACKENDS)
        if case in IN_FULL[backend]
    ],
    ids=str,
)
def test_exact(attention: Callable[..., Any], backend: str, case: Case):
    """A bias that all keys share has its gradient in closed form, but for a `score_mod` after it; `xla` keeps the rule
    there too."""
    assert_exact(attention, case, by_rows=backend not in ("xla", "reference"))


def test_logits_that_rise_from_tile_to_tile(attention: Callable[..., Any]):
    """The reference of the weights has to follow the logits, and earlier sums have to shrink with it."""
    call = build(Case(query_length=40, key_length=150, heads=(1, 1), batch=(), bias="keys"))
    call = cases.with_bias_of_index(call, lambda key: key / 8)
    oracle.assert_right(oracle.run(attention, call), call)


@cover(1)
@pytest.mark.parametrize("sizes", NOTHING, ids=str)
@pytest.mark.parametrize("case", [Case(), cases.EVERYTHING], ids=["plain", "everything"])
def test_no_key_to_see_or_no_query_to_see_it(
    attention: Callable[..., Any], backend: str, case: Case, sizes: dict[str, Any]
):
    assert_exact(attention, cases.served(case, backend)._replace(**sizes))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=cover(0)),
        cases.EVERYTHING,
        pytest.param(Case(query_length=523, key_length=640, bias="keys", causal=True, offset="end"), marks=cover(0)),
    ],
    ids=["plain", "everything", "long"],
)
def test_exact_in_float64(attention: Callable[..., Any], case: Case):
    with jax.enable_x64(True):
        assert_exact(attention, case._replace(dtype="float64"))


@pytest.mark.parametrize(
    "case",
    [
        cases.EVERYTHING._replace(query_length=40, key_length=50),
        pytest.param(cases.EVERYTHING._replace(bias="keys", score_mod="indices"), marks=cover(0)),
    ],
    ids=["everything", "score_mod"],
)
def test_exact_beside_64_bits(attention: Callable[..., Any], backend: str, case: Case):
    """Calls are exact with `jax_enable_x64`, where whatever may have 64 bits has them. Gradients have their arguments'
    dtypes."""
    call = build(cases.served(case, backend)._replace(segments="far apart"))
    wide = cases.with_64_bits(call)
    with jax.enable_x64(True):
        got = oracle.run(attention, wide)
    oracle.assert_right(got, call)
    for name, gradient in got.gradients.items():
        assert gradient.dtype == getattr(wide, name).dtype


@cover(1)
@pytest.mark.parametrize(
    "options", [dict(deterministic=True), dict(precision="highest"), dict(precision=jax.lax.Precision.HIGH)], ids=str
)
def test_exact_with(attention: Callable[..., Any], backend: str, options: dict[str, Any]):
    assert_exact(functools.partial(attention, **options), cases.served(cases.EVERYTHING, backend))


@cover(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["three reads", "where seen"])
def test_tables_of_16_bits(attention: Callable[..., Any], kind: str, dtype: str):
    """Their gradients are sums in float32, rounded once."""
    call = score_mod_tables.call(Case(query_length=71, key_length=99, batch=(2,)), kind, dtype)
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.parametrize("implementation", ["xla", "reference", "metal"])
def test_these_refuse_no_case(implementation: str):
    """These backends refuse no case, so none is ever skipped for them where they can run at all."""
    if implementation == "metal":
        skip_refused("metal", **oracle.arguments(build(Case())))
    for case in EMULATED if implementation == "metal" else CASES:
        arguments = {**oracle.arguments(build(case)), "implementation": implementation}
        assert jflash.explain(**arguments).startswith(f"{implementation} serves"), case


@pytest.mark.parametrize("lack", cases.LACKS["metal"])
def test_what_a_backend_lacks_it_refuses(lack: str):
    """A backend refuses what it lacks with a sentence, with nothing else in the way."""
    call = build(Case(**{lack: cases.EVERYTHING.dropout if lack == "dropout" else "indices"}))
    (_, reason) = jflash.explain(**oracle.arguments(call), implementation="metal").splitlines()
    assert lack in reason


@pytest.mark.parametrize(
    "values",
    [
        cases.FEWER,
        cases.QUICK,
        cases.SHORT,
        cases.LONG,
        cases.EMULATED_FEWER,
        cases.EMULATED_QUICK,
        cases.EMULATED,
        cases.EMULATED_LONG,
    ],
    ids=["fewer", "quick", "short", "long", "emulated_fewer", "emulated_quick", "emulated", "emulated_long"],
)
def test_every_pair_of_values_meets(values: Mapping[str, Sequence[Any]]):
    """Every pair of values meets where there is something to see, but for pairs of which one value leaves nothing."""
    named = [{name: getattr(case, name) for name in values} for case in [*CASES, *EMULATED]]
    telling = [row for row in named if cases.VACUOUS.isdisjoint(row.items())]
    for names in itertools.combinations(values, 2):
        for pair in itertools.product(*(values[name] for name in names)):
            items = set(zip(names, pair, strict=True))
            rows = telling if cases.VACUOUS.isdisjoint(items) else named
            assert any(items <= row.items() for row in rows), items
