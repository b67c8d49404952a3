"""Every recipe of the gallery is right, and computes about as much as it should."""

import importlib
import pathlib
import re

import jax
import numpy as np
import pytest
from short_run import cover

import jflash

GALLERY = pathlib.Path(__file__).parents[2] / "examples" / "gallery"
RECIPES = sorted(path.stem for path in GALLERY.glob("[a-z]*.py") if path.stem != "costs")
SHARES = {
    "alibi": (0.5005, 0.75),
    "causal": (0.5003, 0.67),
    "cross_attention": (0.3543, None),
    "merging": (0.5005, 0.75),
    "neighborhood": (0.0291, 0.22),
    "packed_documents": (0.2471, 0.53),
    "prefix_lm": (0.6385, 0.8),
    "relative_bias": (1, 1),
    "score_mods": (0.5020, 1),
    "sliding_window": (0.1528, 0.25),
    "soft_cap": (0.5005, 0.75),
    "streaming": (0.1550, 0.26),
    "triangle_attention": (1, 1),
}
"""The part of all query-key pairs that is seen, and the most that may be computed in tiles for a CPU."""
QUICK = ("decoding", "hessian_vector_product", "paged_cache", "per_example_gradients", "triangle_attention")


@pytest.fixture(autouse=True)
def _in_gallery(monkeypatch):
    monkeypatch.syspath_prepend(GALLERY)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else cover(0)) for n in RECIPES])
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
