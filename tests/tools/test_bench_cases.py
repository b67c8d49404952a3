"""Tests of what `python -m jflash.bench` measures: its calls, their operations, and which ones are chosen."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover

import jflash
from jflash import _platform
from jflash.bench import cases, in_jax, mask_mods, record, report, score_mods

PLAIN = cases.square("full", "float32", 2, 12, 2, 16)


def brute_force(case):
    """Pairs of one head and one batch entry, one by one."""
    length = max(case.queries, case.keys) if case.length is None else case.length
    segment = lambda i: i * case.segments // case.queries
    return sum(
        max(i, j) < length
        and (not case.is_causal or j <= i)
        and (case.window is None or i - j < case.window)
        and (case.segments == 1 or segment(i) == segment(j))
        for i, j in itertools.product(range(case.queries), range(case.keys))
    )


OPTIONS = [
    dict(),
    dict(keys=5),
    dict(is_causal=True, window=1),
    dict(is_causal=True, window=5),
    dict(is_causal=True, window=50),
    dict(length=7),
    dict(is_causal=True, length=7),
    dict(segments=3),
    dict(is_causal=True, segments=4),
    dict(is_causal=True, segments=2, window=3),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flops_are_those_of_the_visible_pairs(options):
    case = dataclasses.replace(PLAIN, value_dim=8, **options)
    pairs = brute_force(case)
    assert cases.visible_pairs(case) == pairs
    assert cases.flops(case, "fwd") == 2 * pairs * (16 + 8) * 2 * 2
    assert cases.flops(case, "bwd") == 2.5 * cases.flops(case, "fwd")
    assert cases.flops(case, "fwd+bwd") == 3.5 * cases.flops(case, "fwd")
    assert cases.flops(case, "jvp") == 4 * cases.flops(case, "fwd")


def test_causal_alone_counts_half():
    case = dataclasses.replace(PLAIN, is_causal=True)
    assert cases.visible_pairs(case) == 12 * 12 / 2 == brute_force(case) - 12 / 2


@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[5], OPTIONS[8]], ids=str)
def test_what_is_counted_is_what_is_computed(options):
    """The count of pairs is right: where all logits are 0, the log-sum-exp's exponential counts the keys that a query
    sees."""
    case = dataclasses.replace(PLAIN, **options)
    arguments = cases.data(case).arguments
    arguments["query"] = jnp.zeros_like(arguments["query"])
    _, lse = jflash.attention(**arguments, **cases.options(case), return_residual=True)
    assert np.exp(lse).sum() == pytest.approx(case.batch * case.heads * cases.visible_pairs(case))


@pytest.mark.parametrize(
    "name", [name if name == "documents" else pytest.param(name, marks=cover(0)) for name in mask_mods.MASK_MODS]
)
def test_what_a_mask_mod_shows_is_what_is_counted(name):
    """As above, by the function that jflash is given."""
    case = dataclasses.replace(PLAIN, heads=1, key_heads=1, queries=1100, keys=1100, mask_mod=name)
    data = cases.data(case)
    data.arguments["query"] = jnp.zeros_like(data.arguments["query"])
    attend = functools.partial(jflash.attention, return_residual=True)
    function, arguments = in_jax.function_of_arrays(case, "fwd", data, attend)
    _, lse = function(*arguments)
    assert np.exp(lse).sum() == pytest.approx(case.batch * cases.visible_pairs(case))
    assert 0 < cases.visible_pairs(case) < 1100**2


@cover(0)
@pytest.mark.parametrize(
    "case", cases.feature_cases(tokens=64, width=256, dtype="bfloat16"), ids=lambda case: case.name
)
def test_jflash_takes_every_option(case):
    data = cases.data(case)
    function, arrays = in_jax.function_of_arrays(case, "fwd", data)
    out = jax.eval_shape(function, *arrays)
    assert (out.shape, out.dtype) == (data.cotangent.shape, data.cotangent.dtype)


@cover(0)
@pytest.mark.parametrize("name", score_mods.SCORE_MODS)
def test_what_takes_the_place_of_a_score_mod_computes_the_same(name):
    """A stand-in gives the same gradients of what is learned; and it is not plain attention."""
    case = dataclasses.replace(PLAIN, queries=300, keys=300, score_mod=name)
    data = cases.data(case)
    # Beyond the cap, so that it shows.
    data.arguments["query"] *= 20
    outs = []
    for form in ("score_mod", score_mods.SCORE_MODS[name].stand_in, None):
        function, arrays = in_jax.function_of_arrays(case, "fwd+bwd", data, form=form)
        outs.append(jax.jit(function)(*arrays))
    (gradients,) = outs[0][1]
    assert gradients.keys() - {"query", "key", "value"} == {*data.captured} - {"slopes"}
    for ours, theirs, plain in zip(*map(jax.tree.leaves, outs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())
        assert np.abs(plain - ours).max() > 0.02 * np.abs(ours).max()


def test_grid_has_all_tokens_and_the_whole_width():
    grid = dataclasses.replace(cases.Grid.for_platform(_platform.current()), widths=(64,), head_dims=("16", "32"))
    for case in grid.cases():
        assert case.batch * case.queries == grid.tokens
        assert case.heads * case.head_dim == 64
        assert case.asked_width is None


def test_head_dimensions_of_keys_and_values():
    """There are as many heads as fit in the width, and one where none does."""
    grid = cases.Grid((64,), (512,), ("192/128", "576/512", "80"), ("causal",), tokens=64, dtype="float32")
    found = [(case.heads, case.key_heads, case.head_dim, case.value_dim) for case in grid.cases()]
    assert found == [(2, 2, 192, 128), (1, 1, 576, 512), (6, 6, 80, 80)]
    # Of one width, and so in one picture.
    rows = [record.Row.of(case, "jflash", "fwd", record.Figures(ms=1)) for case in grid.cases()]
    assert {row.width for row in rows} == {512}
    assert [report.head_dims(row) for row in rows] == ["192/128", "576/512", "80"]
    for text in ("0", "64/", "wide", "64/64/64", "-8"):
        with pytest.raises(ValueError, match="is written as 128, or as 192/128"):
            dataclasses.replace(grid, head_dims=(text,)).cases()


def test_options_are_chosen_by_words_of_their_names():
    grid = cases.Grid((), (256,), ("64",), ("full",), tokens=64, dtype="float32")
    names = lambda *words: [case.name for case in dataclasses.replace(grid, features=words).cases()]
    assert grid.cases() == []
    assert names() == [case.name for case in cases.feature_cases(64, 256, "float32")]
    assert len(set(names())) == len(names())
    assert names("score_mod: scalar", "decoding") == [
        "score_mod: scalar",
        "decoding, grouped heads",
        "decoding, latent, keys of 576, values of 512",
    ]
    with pytest.raises(ValueError, match=r"No option has 'score mod' in its name\. There are: full; causal, grouped"):
        names("score mod")
