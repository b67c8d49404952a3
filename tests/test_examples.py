"""The examples run as a newcomer runs them, shortened, and what they print holds."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import jflash

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SHORT_TRAINING = {"steps": 5, "batch": 2, "length": 48, "width": 32, "layers": 1}
NUMBER = r"([\d.]+(?:e[+-]\d+)?)"


def run(script: str, *arguments: object) -> str:
    """What `examples/<script>` prints; its exit status must be 0."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"COLUMNS": "120"}
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, printed: str) -> list[float]:
    found = re.search(pattern, printed)
    assert found, f"{pattern} is not in:\n{printed}"
    return [float(number) for number in found.groups()]


def test_quickstart():
    printed = run("quickstart.py", "--tokens", 300, "--heads", 2, "--head-dim", 16, "--repeats", 1)
    assert "serves this call on" in printed
    for row in ("error of the output", "error of the gradients"):
        ours, plain = numbers(rf"{row}[^\d]*{NUMBER}[^\d]*{NUMBER}", printed)
        # An ulp of results between 2 and 4 on top: that is what is lost in writing them down.
        assert ours <= 2 * plain + 2 * np.finfo(np.float32).eps
    for row in ("forward, ms", "forward and backward, ms", "forward, MiB", "with backward, MiB"):
        numbers(rf"{row}[^\d]*{NUMBER}[^\d]*{NUMBER}", printed)


@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_training_agrees_with_the_layers_own_attention(framework, tmp_path):
    picture = tmp_path / "curves.png"
    options = [part for name, value in SHORT_TRAINING.items() for part in (f"--{name}", value)]
    printed = run("train_transformer.py", "--framework", framework, "--picture", picture, *options)
    ours, own = numbers(f"Loss after 5 steps: {NUMBER} with jflash, {NUMBER} with {framework}'s own", printed)
    difference, rounding = numbers(rf"difference at any step: {NUMBER}\. Rounding can make it {NUMBER}\.", printed)
    assert difference <= rounding
    assert abs(ours - own) <= rounding
    image = picture.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000


def test_training_notices_a_wrong_attention(tmp_path, monkeypatch):
    """The comparison, the same for both frameworks, can fail."""

    def one_percent_off(query, *others, **options):
        return jflash.attention(query * 1.01, *others, **options)

    monkeypatch.setattr("jflash.equinox.attention", one_percent_off)
    monkeypatch.syspath_prepend(EXAMPLES)
    train_transformer = importlib.import_module("train_transformer")
    settings = train_transformer.Settings("equinox", picture=tmp_path / "curves.png", **SHORT_TRAINING)
    with pytest.raises(SystemExit, match="more than rounding"):
        train_transformer.main(settings)


def test_cpu_benchmark(tmp_path):
    output = tmp_path / "cpu.json"
    printed = run("benchmarks/cpu.py", "--lengths", 64, "--long", 64, "--rounds", 1, "--output", output)
    record = json.loads(output.read_text())
    names = {row["name"] for row in record["ratios"]}
    assert {"jax.nn / jflash", "causal / full", "memory / q+k+v+out"} <= names
    has_torch = importlib.util.find_spec("torch") is not None
    assert ("torch / jflash, full" in names) == has_torch
    assert record["about"].endswith("torch missing") == (not has_torch)
    for row in record["ratios"]:
        assert row["ratio"] == row["dividend"] / row["divisor"] > 0
        assert f"{row['ratio']:.2f}" in printed
    assert all(len(case["ms"]) == 1 and case["ms"][0] > 0 for case in record["samples"])
