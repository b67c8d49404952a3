"""`python -m jflash.bench --limit-s`: a library that hangs or crashes costs its own figures, and no other."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import sys
import threading
import time

import pytest
from short_run import cover

from jflash.bench import __main__ as bench
from jflash.bench import cases, limits, measure, record

CASES = [cases.square(name, "float32", 1, 8, 1, 8) for name in ("easy", "hard")]
ABOUT = record.About("2026-11-25", "a machine", "a clock", {})
PEERS = ("jflash", "jax.nn", "torch")


def works(case):
    return measure.works(case, backward=True, forward_mode=False)


def begun(case, peer):
    return measure.Begun("compile", 6, case, peer)


def measuring(path, connection, resume):
    """Measure as a run does, with figures of its own: jax.nn hangs in the second case, and torch ends its process
    there."""
    found = record.read(path) if resume else record.Record(ABOUT, None, ())
    found.write(path)
    for case in CASES:
        for peer in PEERS:
            if found.has(case, peer, works(case)):
                continue
            connection.send(begun(case, peer))
            if (case.name, peer) == ("hard", "jax.nn"):
                time.sleep(600)
            if (case.name, peer) == ("hard", "torch"):
                os._exit(3)
            figures = record.Figures(ms=float(os.getpid()))
            found = found.with_rows([record.Row.of(case, peer, work, figures) for work in ("fwd", "bwd", "fwd+bwd")])
            found.write(path)
    connection.send(None)


def ending(connection, resume):
    sys.exit(1)


def test_time_is_counted_for_each_case_of_each_library():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    heard = []
    for _ in range(3):
        theirs.send(begun(CASES[0], "jflash"))
    theirs.send(begun(CASES[0], "torch"))
    stopped, number = limits._watch(ours, 0.05, heard.append, 10)
    assert stopped == (CASES[0], "torch", "It took longer than 0.05 s.")
    assert number == 14
    assert [step.peer for step in heard] == ["jflash"] * 3 + ["torch"]
    assert {step.steps for step in heard} == {16}
    theirs.send(begun(CASES[1], "jflash"))
    theirs.close()
    assert limits._watch(ours, 60, heard.append, 0) == ((CASES[1], "jflash", None), 1)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(None)
    assert limits._watch(ours, 60, heard.append, 0) == (None, 0)
    theirs.send("A reason.")
    with pytest.raises(ValueError, match=r"^A reason\.$"):
        limits._watch(ours, 60, heard.append, 0)


def test_a_case_of_many_short_steps_has_the_same_limit():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    done = threading.Event()

    def go_on():
        while not done.wait(0.01):
            theirs.send(begun(CASES[0], "jflash"))

    thread = threading.Thread(target=go_on)
    thread.start()
    start = time.monotonic()
    stopped, number = limits._watch(ours, 0.2, lambda _: None if time.monotonic() < start + 20 else done.set(), 0)
    assert not done.is_set()
    done.set()
    thread.join()
    assert stopped == (CASES[0], "jflash", "It took longer than 0.2 s.")
    assert number > 0


@cover(0)
def test_what_hangs_or_crashes_is_refused_and_the_run_goes_on(tmp_path):
    path, heard = tmp_path / "bench.json", []
    found = limits.measured(functools.partial(measuring, path), path, False, 1.0, works, heard.append)
    assert found == record.read(path)
    rows = {(row.case, row.peer, row.work): row.figures for row in found.rows}
    assert len(rows) == len(found.rows) == 18
    refusals = {key: figures.refusal for key, figures in rows.items() if figures.refusal is not None}
    assert refusals == {
        **{("hard", "jax.nn", work): "It took longer than 1 s." for work in ("fwd", "bwd", "fwd+bwd")},
        **{("hard", "torch", work): "The process ended with exit code 3." for work in ("fwd", "bwd", "fwd+bwd")},
    }
    # All of these by the first process, once.
    assert len({figures.ms for figures in rows.values() if figures.ms is not None}) == 1
    assert [(step.case.name, step.peer) for step in heard] == [(case.name, peer) for case in CASES for peer in PEERS]
    with pytest.raises(RuntimeError, match="ended before the first case"):
        limits.measured(ending, path, False, 1.0, works, heard.append)


@cover(0)
def test_a_run_within_limits_is_like_any_other(tmp_path, monkeypatch):
    options = {"lengths": 64, "widths": 32, "head-dims": "16/8", "tokens": 64, "masks": "full", "rounds": 1}
    command = [*(f"--{name}={value}" for name, value in options.items()), "--peers", "jflash", f"--output={tmp_path}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main([*command, "--limit-s=300", "--name=own", "--features", "scalar"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "own.json",
        *(f"own-{name}.png" for name in ("forward", "backward", "options")),
    }
    first = (tmp_path / "own.json").read_text()
    rows = json.loads(first)["rows"]
    assert {(row["case"], row["head_dim"], row["value_dim"]) for row in rows} == {
        ("full", 16, 8),
        ("score_mod: scalar", 128, 128),
    }
    assert all("ms" in row for row in rows)
    assert "score_mod: scalar: 2 x 32, 1 x d128" in printed.getvalue()
    # Nothing is left to do.
    with contextlib.redirect_stdout(io.StringIO()):
        bench.main([*command, "--resume", "--name=own", "--features", "scalar"])
    assert (tmp_path / "own.json").read_text() == first
    # In a sentence, by the process that measures.
    with pytest.raises(SystemExit, match=r"^The record cannot be gone on with.*median of 1 round\b"):
        bench.main([*command, "--rounds=2", "--limit-s=300", "--resume", "--name=own", "--features", "scalar"])
