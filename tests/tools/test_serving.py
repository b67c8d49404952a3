"""The example server: the same text as with a dense cache, and pages that never belong to two requests by mistake."""

import importlib
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from short_run import cover

import jflash

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SHORT = dict(
    requests=6, prefix=9, longest=12, wanted=7, slots=3, budget=8, page_size=4, pages=20, length=32, width=32, layers=1,
    rounds=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name: str) -> Any:
    return importlib.import_module(name)


def test_same_text(capsys: pytest.CaptureFixture[str]):
    """Prompts with the same beginning share its pages, and all pages come back."""
    serve = example("serve")
    serve.main(serve.Settings(**SHORT))
    printed = capsys.readouterr().out
    assert "Both caches gave the same text." in printed
    assert "xla serves this call" in printed or jax.default_backend() != "cpu"
    pages = re.search(r"Pages: (\d+) of (\d+) in use at most, (\d+) shared, (\d+) free", printed)
    used, of, shared, free = map(int, pages.groups())
    assert 0 < shared < used <= of == free == 20


@cover(0)
def test_what_was_trained(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    serve, train_transformer = example("serve"), example("train_transformer")
    path = tmp_path / "weights.npz"
    training = dict(steps=5, batch=2, length=SHORT["length"], width=32, layers=1, attention=("jflash",), weights=path)
    train_transformer.main(train_transformer.Settings("flax", picture=tmp_path / "curves.png", **training))
    serve.main(serve.Settings(**SHORT, weights=path))
    assert "Both caches gave the same text." in capsys.readouterr().out
    with pytest.raises(SystemExit, match="of another shape"):
        serve.main(serve.Settings(**SHORT | dict(width=64), weights=path))


@cover(0)
def test_pages_that_are_mixed_up_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """The comparison can fail."""
    serve, update = example("serve"), jflash.update_pages
    elsewhere = lambda pages, key, value, lens, table, *rest: update(pages, key, value, lens, table // 2, *rest)
    monkeypatch.setattr(jflash, "update_pages", elsewhere)
    jax.clear_caches()
    with pytest.raises(SystemExit, match="texts differ"):
        serve.main(serve.Settings(**SHORT))
    jax.clear_caches()


@pytest.mark.parametrize("seed", range(3))
def test_schedule(seed: int):
    """Many requests share few pages. Every token is computed once and in order, those that decode before prompts; and a
    request finds its own tokens in its pages, even in pages that another request wrote."""
    scheduler, random = example("scheduler"), np.random.default_rng(seed)
    prefixes = [tuple(random.integers(0, 9, 11).tolist()) for _ in range(2)]
    requests = [
        scheduler.Request(
            (*prefixes[number % 3], *random.integers(0, 9, random.integers(1, 9)).tolist())
            if number % 3 < 2
            else tuple(random.integers(0, 9, random.integers(1, 20)).tolist()),
            int(random.integers(1, 12)),
            int(random.integers(0, 40)),
        )
        for number in range(20)
    ]
    pool = scheduler.PagePool(20, 4)
    server = scheduler.Scheduler(requests, pool, slots=5, budget=9, width=10)
    held = np.full((20, 4), -1)
    shared = 0
    while server.is_busy:
        step = server.next_step()
        count = int(step.num_seqs[0])
        pending = [request.pending > 1 for request, _ in server._batch]
        assert 0 < step.cu_q_lens[count] <= 9
        assert sorted(pending) == pending
        for row, (request, computed) in enumerate(server._batch):
            own = slice(step.cu_q_lens[row], step.cu_q_lens[row + 1])
            places = np.arange(request.computed, request.computed + computed)
            np.testing.assert_array_equal(step.positions[own], places)
            np.testing.assert_array_equal(step.tokens[own], np.array(request.tokens)[places])
            held[step.page_indices[row, places // 4], places % 4] = step.tokens[own]
        for row, (request, _) in enumerate(server._batch):
            places = np.arange(step.kv_lens[row])
            np.testing.assert_array_equal(
                held[step.page_indices[row, places // 4], places % 4], request.tokens[: len(places)]
            )
        shared += sum(request.shared for request, _ in server._batch)
        server.advance(random.integers(0, 9, 5))
    assert [len(request.got) for request in requests] == [request.wanted for request in requests]
    assert sorted(pool.free) == list(range(20))
    assert shared > 0


def test_too_few_pages():
    scheduler = example("scheduler")
    server = scheduler.Scheduler(
        [scheduler.Request((1,) * 9, 3, 0)], scheduler.PagePool(2, 4), slots=1, budget=4, width=9
    )
    with pytest.raises(ValueError, match="`pages` are too few"):
        server.next_step()
