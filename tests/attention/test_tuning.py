"""Tiles that were found by measurement: stored for one device, read there and nowhere else, and still right."""

import contextlib
import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import oracle
import pytest
from operands import normal
from plain_attention import Call
from short_run import cover

import jflash
from jflash import _platform, _settings, _tuning
from jflash._backends.xla import plans
from jflash._backends.xla.plans import Blocks
from jflash._tuning import TuningKey
from jflash.bench import __main__ as bench
from jflash.bench import cases, clocks, tune

QUESTION = TuningKey("xla forward", ("alike",))
LARGE, SMALL = Blocks(64, 64, 2**12), Blocks(16, 32, 2**9)
BLOCKS = {kind: [LARGE, SMALL] for kind in plans.CPU}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Nothing is found, and what is stored is gone after the test."""
    monkeypatch.setattr(_settings, "tiles_cache", lambda: tmp_path)
    _tuning._found.cache_clear()
    yield tmp_path
    _tuning._found.cache_clear()
    jax.clear_caches()


def test_without_anything_found_the_backend_chooses():
    assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE


def test_what_is_found_counts_on_its_device_alone(monkeypatch):
    path = _tuning.store(_platform.device_name(), {QUESTION: SMALL}, {"date": "today"})
    assert json.loads(path.read_text())["date"] == "today"
    assert _tuning.choose(QUESTION, [LARGE, SMALL]) == SMALL
    assert _tuning.choose(TuningKey("xla backward", ("alike",)), [LARGE, SMALL]) == LARGE
    monkeypatch.setattr(_platform, "device_name", lambda: "another")
    assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE


def test_what_no_longer_fits_is_not_taken():
    _tuning.store(_platform.device_name(), {QUESTION: SMALL}, {})
    assert _tuning.choose(QUESTION, [LARGE]) == LARGE


def test_a_file_that_cannot_be_read_is_named(folder):
    path = _tuning.store(_platform.device_name(), {QUESTION: SMALL}, {})
    path.write_text(path.read_text()[:-9])
    _tuning._found.cache_clear()
    with pytest.raises(ValueError, match=rf"{path.name} is not as .* writes it: delete it"):
        jflash.attention(*[jnp.ones((1, 3, 1, 8))] * 3)


def test_without_platformdirs_nothing_is_found_and_storing_says_why(monkeypatch):
    monkeypatch.setattr(_settings, "tiles_cache", lambda: None)
    assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE
    with pytest.raises(ModuleNotFoundError, match="platformdirs"):
        _tuning.store("device", {}, {})


def test_tiles_that_are_tried_come_before_those_found():
    _tuning.store(_platform.device_name(), {QUESTION: SMALL}, {})
    with _tuning.trying({}) as trial:
        assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE
    assert trial.asked == {QUESTION: (LARGE, SMALL)}
    with _tuning.trying({QUESTION: SMALL}):
        assert _tuning.choose(QUESTION, [LARGE, SMALL]) == SMALL


def test_other_platforms_that_a_call_is_traced_for_are_not_measured():
    elsewhere = dataclasses.replace(_platform.current(), name="another")
    with _tuning.trying({QUESTION: SMALL}) as trial, _platform.lowered_for(elsewhere):
        assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE
    assert trial.asked == {}


@cover(every=3)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": 5}], ids=str)
def test_tiles_found_serve_calls_and_are_right(monkeypatch, options):
    monkeypatch.setattr(plans, "CPU", BLOCKS)
    keys = [TuningKey(f"xla {work}", (kind,)) for work in ("forward", "backward") for kind in BLOCKS]
    _tuning.store(_platform.device_name(), dict.fromkeys(keys, SMALL), {})
    asked = []
    plan = plans.plan
    monkeypatch.setattr(plans, "plan", lambda *arguments: asked.append(plan(*arguments)) or asked[-1])
    query, key, value, d_out = (normal(seed, 1, 50, 2, 8) for seed in range(4))
    call = Call(query, key, value, d_out=d_out, d_lse=normal(4, 1, 50, 2), **options)
    attention = functools.partial(jflash.attention, implementation="xla")
    oracle.assert_right(oracle.run(attention, call), call)
    # What is traced for all platforms but CPUs was not tuned here.
    assert {tiles.queries for tiles in asked if not tiles.by_passes} == {16}


def test_search_keeps_what_is_faster(monkeypatch, folder):
    """The search has a clock by which small tiles take half the time backward, and nearly all of it forward."""
    monkeypatch.setattr(plans, "CPU", BLOCKS)

    def prepare(function, *arguments):
        with_small = [key.kind for key, blocks in _tuning._trial.get().answers.items() if blocks == SMALL]
        ms = 100 - 50 * ("xla backward" in with_small) - ("xla forward" in with_small)
        return clocks.Prepared(lambda: [ms], clocks.Figures())

    monkeypatch.setattr(clocks, "prepare", prepare)
    found = tune.tune([cases.square("full", "float32", 1, 128, 1, 16)], 1, lambda label, steps: None)
    assert [(one.open.key.kind, one.tiles, one.times) for one in found] == [
        ("xla forward", LARGE, (100, 99)),
        ("xla backward", SMALL, (100, 50)),
    ]
    tune.store(found)
    assert _tuning.choose(QUESTION, [LARGE, SMALL]) == LARGE
    assert _tuning.choose(TuningKey("xla backward", ("whole rows",)), [LARGE, SMALL]) == SMALL


def test_search_from_a_checkout_that_was_never_installed(nothing_installed, folder):
    """A search that has measured everything must not fail because nothing is installed."""
    assert "from a folder on the path" in tune.store([]).read_text()


@cover(0)
def test_command_tunes_this_machine(monkeypatch, folder):
    monkeypatch.setattr(plans, "CPU", BLOCKS)
    monkeypatch.setattr(clocks, "SAMPLE_MS", 1)
    monkeypatch.setattr(clocks, "REST_S", 0)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cases, "feature_cases", lambda *grid: [])
    options = {"lengths": 64, "widths": 16, "head-dims": 16, "tokens": 64, "dtype": "float32", "rounds": 1}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main(["--tune", *(f"--{name}={value}" for name, value in options.items())])
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["device"] == _platform.device_name()
    assert f"wrote {path}" in printed.getvalue().replace("\n", "")
    for kind in ("xla forward alike", "xla backward masked"):
        assert kind in printed.getvalue()
