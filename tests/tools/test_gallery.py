"""Every recipe of the gallery is right, and computes about as much as it should."""

import importlib
import pathlib
import re

import numpy as np
import pytest

import jflash

GALLERY = pathlib.Path(__file__).parents[2] / "examples" / "gallery"
RECIPES = sorted(path.stem for path in GALLERY.glob("[a-z]*.py") if path.stem != "costs")
SHARES = {
    "alibi": (0.5005, 0.75),
    "causal": (0.5002, 0.625),
    "merging": (0.5005, 0.75),
}
"""Of all query-key pairs, those that are seen, and the most that may be computed."""
SLOW = ()


@pytest.fixture(autouse=True)
def _in_gallery(monkeypatch):
    monkeypatch.syspath_prepend(GALLERY)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in RECIPES])
def test_recipe(name):
    found = importlib.import_module(name).main()
    assert found.errors
    # A few roundings on top, which matter where plain attention is exact by luck.
    allowed = lambda plain: 2 * plain + 4 * np.finfo(np.float32).eps
    wrong = {result: pair for result, pair in found.errors.items() if not pair[0] <= allowed(pair[1])}
    assert not wrong
    assert (name in SHARES) == (found.computed is not None)
    if found.computed is not None:
        seen, most = SHARES[name]
        assert found.seen == pytest.approx(seen, abs=1e-4)
        assert found.seen <= found.computed <= most


def test_wrong_attention_is_noticed(monkeypatch):
    """The comparison can fail."""
    attention = jflash.attention
    monkeypatch.setattr(jflash, "attention", lambda query, *rest, **options: attention(query * 1.01, *rest, **options))
    found = importlib.import_module("merging").main()
    assert all(ours > 100 * plain for ours, plain in found.errors.values())


def test_table_has_every_recipe():
    """And the figures of costs.py, which finds its rows by these links."""
    rows = re.findall(r'^\| .*?\]\((\w+)\.py "([\w ]+)"\)', (GALLERY / "README.md").read_text(), re.MULTILINE)
    assert {file for file, _ in rows} == set(RECIPES)
    assert set(rows) == set(importlib.import_module("costs").CASES)
