"""Every recipe of the gallery is right, and computes about as much as it should."""

import importlib
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from short_run import cover

import jflash

GALLERY = pathlib.Path(__file__).parents[2] / "examples" / "gallery"
RECIPES = sorted(path.stem for path in GALLERY.glob("[a-z]*.py") if path.stem != "costs")
SHARES = {
    "alibi": (0.5005, 0.75),
    "block_table": (0.1956, 0.52),
    "causal": (0.5003, 0.67),
    "cross_attention": (0.3543, None),
    "mask_mods": (0.0841, 0.63),
    "merging": (0.5005, 0.75),
    "neighborhood": (0.0291, 0.22),
    "packed_documents": (0.2471, 0.53),
    "prefix_lm": (0.6385, 0.8),
    "qk_clip": (0.5005, 0.75),
    "relative_bias": (1, 1),
    "score_mods": (0.5020, 1),
    "sliding_window": (0.1528, 0.25),
    "soft_cap": (0.5005, 0.75),
    "streaming": (0.1550, 0.26),
    "tree_attention": (0.9711, 1),
    "triangle_attention": (1, 1),
}
"""The part of all query-key pairs that is seen, and the most that may be computed in tiles for a CPU."""
IN_SHORT_RUN = ("decoding", "triangle_attention")


@pytest.fixture(autouse=True)
def _in_gallery(monkeypatch):
    monkeypatch.syspath_prepend(GALLERY)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in IN_SHORT_RUN else cover(0)) for n in RECIPES])
def test_recipe(name):
    found = importlib.import_module(name).main()
    assert found.errors
    # On top what the longest sums here, of 2**20 terms, may lose where plain attention is exact by luck (oracle.py).
    allowed = lambda plain: 2 * plain + 12 * np.finfo(np.float32).eps
    wrong = {result: pair for result, pair in found.errors.items() if not pair[0] <= allowed(pair[1])}
    assert not wrong
    if name in SHARES:
        seen, most = SHARES[name]
        assert found.seen == pytest.approx(seen, abs=1e-4)
        assert (most is None) == (found.computed is None)
        if found.computed is not None and jax.default_backend() == "cpu":
            assert found.seen <= found.computed <= most


@cover(0)
def test_wrong_attention_is_noticed(monkeypatch):
    """The comparison can fail."""
    attention = jflash.attention
    monkeypatch.setattr(jflash, "attention", lambda query, *rest, **options: attention(query * 1.01, *rest, **options))
    found = importlib.import_module("merging").main()
    assert all(ours > 100 * plain for ours, plain in found.errors.values())


def test_table_has_every_recipe():
    """The table has every recipe, and the figures of costs.py, which finds its rows by these links."""
    rows = re.findall(r'^\| .*?\]\((\w+)\.py "([\w ]+)"\)', (GALLERY / "README.md").read_text(), re.MULTILINE)
    assert {file for file, _ in rows} == set(RECIPES)
    assert set(rows) == set(importlib.import_module("costs").CASES)


def logits_of(kind: str) -> tuple[Any, Any]:
    """Queries and keys of 4 heads on 2: of normal numbers, with one key that stands out, or with logits all alike."""
    numbers = np.random.default_rng(0)
    query, key = (numbers.standard_normal((2, 256, heads, 16)).astype(np.float32) for heads in (4, 2))
    if kind == "peaked":
        key[:, 100] = 60 * query[:, 200, ::2]
    if kind == "alike":
        query[:], key[:] = 5, 5
    return query * 4, key


@pytest.mark.parametrize("kind", ["normal", "peaked", "alike"])
def test_qk_clip_holds_the_true_maximum(kind):
    """By the bound that the log-sum-exp is, and by the sharper one; neither clips less than the threshold asks for."""
    qk_clip = importlib.import_module("qk_clip")
    query, key = logits_of(kind)
    exact = np.asarray(qk_clip.plain_largest(query, key), np.float64)
    # The sum of 16 products, and the logarithm, are rounded relative to the largest logit.
    rounding = 32 * np.finfo(np.float32).eps * exact
    loose, sharp = qk_clip.attend(query, key, key)[1], qk_clip.largest_logits(query, key)
    for bound, beta in ((loose, 1), (sharp, 16)):
        above = np.asarray(bound, np.float64) - exact
        assert np.all(above >= -rounding)
        assert np.all(above <= np.log(256) / beta + rounding)
    if kind == "peaked":
        # Where one key has all the weight the bound is the maximum.
        assert np.all((loose - exact)[::2] <= rounding[::2])
    if kind == "alike":
        # Here it is as loose as it can be.
        assert np.all(loose - exact >= np.log(256) - 1e-3)

    threshold = float(exact.min()) / 2
    for bound in (loose, sharp):
        # Each head's weights are its queries and keys themselves: one token for each feature.
        flat = [array.reshape(-1, *array.shape[2:]) for array in (query, key)]
        clipped = [array.reshape(2, 256, -1, 16) for array in qk_clip.clip(*flat, bound, threshold)]
        left = np.asarray(qk_clip.plain_largest(*clipped), np.float64)
        assert np.all(left <= threshold + rounding)
        assert np.all(left >= threshold * exact / (exact + np.log(256)) - rounding)


def test_qk_clip_leaves_small_logits():
    qk_clip = importlib.import_module("qk_clip")
    query, key = logits_of("normal")
    weights = query[0], key[0]
    for before, after in zip(weights, qk_clip.clip(*weights, np.full(4, 50.0)), strict=True):
        np.testing.assert_array_equal(before, after)
