"""The examples run as a newcomer runs them, shortened, and what they print holds."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from operands import PLAIN
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _platform, doctor
from jflash._platform import Platform
from jflash_metal import _ffi

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SHORT_TRAINING = {"steps": 5, "batch": 2, "length": 48, "width": 32, "layers": 1}
RECORDED_TRAINING = sorted((EXAMPLES / "benchmarks").glob("train-*.json"))
NUMBER = r"([\d.]+(?:e[+-]\d+)?)"


def run(script: str, *arguments: object, **environment: str) -> str:
    """Return what `examples/<script>` prints; its exit status must be 0."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | environment
    environment["COLUMNS"] = "120"
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(pattern: str, printed: str) -> list[float]:
    found = re.search(pattern, printed)
    assert found, f"{pattern} is not in:\n{printed}"
    return [float(number) for number in found.groups()]


@cover(0)
def test_quickstart():
    printed = run("quickstart.py", "--tokens", 300, "--heads", 2, "--head-dim", 16, "--repeats", 1)
    assert "serves this call on" in printed
    for row in ("error of the output", "error of the gradients"):
        ours, plain = numbers(rf"{row}[^\d]*{NUMBER}[^\d]*{NUMBER}", printed)
        # An ulp of results between 2 and 4 on top: that is what is lost in writing them down.
        assert ours <= 2 * plain + 2 * np.finfo(np.float32).eps
    for row in ("forward, ms", "forward and backward, ms", "forward, MiB", "with backward, MiB"):
        numbers(rf"{row}[^\d]*{NUMBER}[^\d]*{NUMBER}", printed)


@cover(0)
@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_training_agrees_with_the_layers_own_attention(framework, tmp_path):
    picture = tmp_path / "curves.png"
    options = [part for name, value in SHORT_TRAINING.items() for part in (f"--{name}", value)]
    printed = run("train_transformer.py", "--framework", framework, "--picture", picture, *options)
    ours, own = (numbers(rf"{name} +│ {NUMBER}", printed)[0] for name in ("jflash", "own"))
    difference, rounding = numbers(rf"from own: {NUMBER}\. Rounding can make it {NUMBER}\.", printed)
    assert difference <= rounding
    assert abs(ours - own) <= rounding
    assert_is_picture(picture)


@pytest.fixture
def train_transformer(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_transformer")


@cover(0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_beside_jax_nn(train_transformer, dtype, tmp_path, capsys):
    """The same weights and batches: losses agree within rounding, and the record holds all that was printed."""
    paths = {"picture": tmp_path / "curves.png", "record": tmp_path / "record.json"}
    options = {**SHORT_TRAINING, **paths, "dtype": dtype, "attention": ("jflash", "xla")}
    train_transformer.main(train_transformer.Settings("flax", **options))
    printed = capsys.readouterr().out
    record = json.loads(paths["record"].read_text())
    runs = record["runs"]
    assert list(runs) == ["jflash", "xla", "disturbed"]
    losses = {name: np.array(run["losses"]) for name, run in runs.items()}
    assert all(len(each) == 5 for each in losses.values())
    assert losses["jflash"][-1] < losses["jflash"][0]
    allowed = abs(losses["disturbed"] - losses["xla"]).max()
    assert abs(losses["jflash"] - losses["xla"]).max() <= allowed == record["differences"]["disturbed"]
    assert record["settings"]["dtype"] == dtype
    for run in runs.values():
        assert run["tokens_per_second"] == 2 * 48 / np.median(run["seconds"][1:])
        assert run["step_mib"] > 0
    assert f"{runs['xla']['losses'][-1]:.7f}" in printed
    assert_is_picture(paths["picture"])


@cover(0)
def test_training_leaves_out_what_does_not_fit(train_transformer, monkeypatch, tmp_path, capsys):
    """A step that needs more than the device has beside the other runs is not run, and the table says so."""
    options = {**SHORT_TRAINING, "length": 512, "attention": ("xla", "jflash"), "picture": tmp_path / "curves.png"}
    settings = train_transformer.Settings("flax", **options)
    runs = {name: train_transformer.Run(settings.complete(), name) for name in settings.attention}
    assert runs["jflash"].planned_bytes < runs["xla"].planned_bytes
    needed = runs["xla"].planned_bytes + len(runs) * runs["xla"].kept_bytes
    monkeypatch.setattr(train_transformer, "device_bytes", lambda: needed - 1)
    train_transformer.main(settings)
    printed = capsys.readouterr().out
    assert re.search(r"xla +│ a step needs", printed)
    numbers(rf"jflash +│ {NUMBER}", printed)
    monkeypatch.setattr(train_transformer, "device_bytes", lambda: 0)
    with pytest.raises(SystemExit, match=r"jflash: a step needs .* MiB, and the other runs leave 0"):
        train_transformer.main(settings)


@pytest.mark.parametrize(
    ("framework", "options", "sentence"),
    [
        ("flax", {"attention": ("jflash", "cudnn")}, "`--attention cudnn` needs an NVIDIA GPU, and this is cpu"),
        ("equinox", {"attention": ("jflash", "xla")}, "`--framework equinox` has the small size in float32"),
        ("equinox", {"size": "gpt2"}, "`--framework equinox` has the small size in float32"),
        ("equinox", {"dtype": "bfloat16"}, "`--framework equinox` has the small size in float32"),
    ],
)
def test_training_refuses(train_transformer, framework, options, sentence):
    with pytest.raises(SystemExit, match=sentence):
        train_transformer.main(train_transformer.Settings(framework, **options))


def test_training_refuses_cudnn_in_float32(train_transformer, monkeypatch):
    monkeypatch.setattr(train_transformer, "on_nvidia", lambda: True)
    with pytest.raises(SystemExit, match="give `--dtype bfloat16`"):
        train_transformer.Settings("flax", attention=("cudnn",)).complete()
    assert train_transformer.Settings("flax", attention=("cudnn",), size="gpt2").complete().dtype == "bfloat16"


def test_gpt2_has_its_parameters(train_transformer):
    """GPT-2 has 124,439,808 parameters with 1,024 positions, and `width` more for each other one; none takes memory."""
    transformer_flax = importlib.import_module("transformer_flax")
    settings = train_transformer.Settings("flax", size="gpt2").complete()
    shape = {name: getattr(settings, name) for name in ("width", "heads", "layers")}

    def parameters(length: int) -> int:
        model = lambda: transformer_flax.Transformer(
            train_transformer.TOKENS["gpt2"], length, **shape, attention="jflash", seed=0
        )
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: transformer_flax.split(model())[0])))

    assert parameters(1024) == 124_439_808
    assert parameters(8192) == 124_439_808 + (8192 - 1024) * 768


@pytest.mark.parametrize("path", RECORDED_TRAINING, ids=lambda path: path.name)
def test_training_record(path):
    """The record's losses agree within rounding, and it has a picture beside it."""
    record = json.loads(path.read_text())
    differences = dict(record["differences"])
    allowed = differences.pop("disturbed")
    assert 0 < max(differences.values()) <= allowed
    assert_is_picture(path.with_suffix(".png"))


def assert_is_picture(path: pathlib.Path) -> None:
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(image) > 10_000


@cover(0)
def test_meanflow_learns_the_same_from_plain_attention(tmp_path):
    """Three steps of training differ by rounding between the tangent through the tiles and through the definition."""
    losses = []
    for implementation in ("xla", "reference"):
        picture = tmp_path / f"{implementation}.png"
        options = ("--steps", 3, "--batch", 8, "--width", 32, "--layers", 2, "--implementation", implementation)
        printed = run("meanflow.py", "--picture", picture, *options)
        losses.append(numbers(rf"Loss: {NUMBER} at first, {NUMBER} after 3 steps", printed))
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    # Adam's first steps are of one size, whatever a gradient's is, so where that is rounding their sign may differ.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    assert losses[0][0] != losses[0][1]


@cover(0)
@pytest.mark.parametrize(
    ("context", "heads", "travels", "stays"),
    [(8, 4, "collective-permute", "all-to-all"), (4, 4, "all-to-all", "collective-permute")],
    ids=["ring", "all_to_all"],
)
def test_long_context_gathers_nothing(context, heads, travels, stays):
    """The losses are those of one device, and a device receives no more than its own parts of the activations."""
    options = {"steps": 2, "data": 8 // context, "context": context, "heads": heads, "length": 256, "width": 32}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    printed = run("long_context.py", "--layers", 1, *arguments)
    assert "xla serves this call on cpu" in printed
    difference, rounding = numbers(rf"difference at any step: {NUMBER}\. Rounding can make it {NUMBER}\.", printed)
    assert difference <= rounding
    for step in (0, 1):
        one, split = numbers(rf"{step} +\W+{NUMBER}\W+{NUMBER}", printed)
        assert abs(one - split) <= rounding
    row = lambda name: numbers(rf"{name} +\W+{NUMBER}\W+{NUMBER}", printed.replace(",", ""))
    one, split = row("temporary")
    assert split < one / 4
    batch_and_length = 2 * 256 // 8
    own = batch_and_length * 32 * 4 / 1024
    # In the ring's backward keys, values and the gradients of both are one message.
    assert row(travels)[1] == (4 if travels == "collective-permute" else 1) * own
    assert row("all-reduce")[1] > 0
    for name in ("all-gather", "reduce-scatter", stays):
        assert row(name) == [0, 0]


@cover(0)
def test_long_context_on_paper():
    """No strategy is better than ideal, and beyond a host all-to-all inside hosts and a ring of hosts are best."""
    printed = run("benchmarks/long_context.py")
    fractions = {}
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) == 8:
            fractions[tuple(cells[:3])] = [float(part) for part in cells[6].split("/")]
    assert len(fractions) == 36
    assert all(0 < fraction <= 1 for pair in fractions.values() for fraction in pair)
    best = {key: max(found for other, found in fractions.items() if other[:2] == key[:2]) for key in fractions}
    assert all(fractions[key] == best[key] for key in fractions if key[2] in ("both", "all_to_all"))


@cover(0)
def test_split_sequences_are_timed(tmp_path):
    """The record is added to, and all-to-all takes no part where key heads are fewer than devices."""
    output = tmp_path / "times.json"
    for heads in ("2:2", "2:1"):
        options = ("--tokens", 64, "--heads", heads, "--masks", "causal", "--head-dim", 16, "--rounds", 1)
        run(
            "benchmarks/sequences.py",
            *options,
            "--output",
            output,
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )
    found = [row["strategy"] for row in json.loads(output.read_text())["times"] if row["work"] == "gradient"]
    assert found == ["one device", "chosen", "ring", "all_to_all", "gather", "one device", "chosen", "ring", "gather"]
    assert output.with_suffix(".png").stat().st_size > 0


@cover(0)
@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_training_notices_a_wrong_attention(train_transformer, framework, tmp_path, monkeypatch):
    """The comparison can fail."""

    def one_percent_off(query, *others, **options):
        return jflash.attention(query * 1.01, *others, **options)

    monkeypatch.setattr(f"jflash.{framework}.attention", one_percent_off)
    settings = train_transformer.Settings(framework, picture=tmp_path / "curves.png", **SHORT_TRAINING)
    with pytest.raises(SystemExit, match="more than rounding"):
        train_transformer.main(settings)


@cover(0)
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


@pytest.fixture
def emulated() -> None:
    """Skips where Metal kernels cannot run, or where nobody counts what they do."""
    skip_refused("metal", **PLAIN)
    if _ffi.host() != "emulator":
        pytest.skip("The kernels run on an Apple GPU here.")


@pytest.mark.usefixtures("emulated")
def test_ladder(monkeypatch):
    """Every step is right, and gives what the one before it is there to be improved in."""
    monkeypatch.syspath_prepend(EXAMPLES / "ladder")
    ladder = importlib.import_module("run")
    names = ("title", *ladder.COLUMNS)
    rows = {row[0][:2]: dict(zip(names, row, strict=True)) for row in ladder.rows(64, 32)}
    number = lambda step, name: float(rows[step][name].replace(",", ""))
    assert all(float(row["error"]) < 1e-5 for row in rows.values())
    assert number("V0", "device read, KiB") > 10 * number("V1", "device read, KiB")
    assert number("V2", "threadgroup, KiB") > 3 * number("V3", "threadgroup, KiB")
    assert number("V3", "8x8x8 products") > number("V2", "8x8x8 products") == 0
    assert number("V4", "device read, KiB") > 1.5 * number("V3", "device read, KiB")


def test_ladder_backward_without_atomics_owns_what_it_writes():
    text = (EXAMPLES / "ladder" / "backward_owned.metal").read_text()
    assert "atomic_" not in text
    shaders = EXAMPLES.parent / "jflash_metal" / "shaders"
    assert not any("atomic_" in path.read_text() for path in shaders.iterdir())


@cover(every=3)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("setting", range(3), ids=["plain", "causal, segments", "bias"])
def test_metal_costs_are_those_of_the_tiling(monkeypatch, setting):
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    metal_costs = importlib.import_module("metal_costs")
    options = [dict(), dict(is_causal=True, segments=4), dict(bias=True)][setting]
    costs = list(metal_costs.costs(metal_costs.Setting("bfloat16", 64, length=256, **options)))
    assert [cost.kernel for cost in costs] == ["forward", "delta", "d_query", "d_key_value"]
    for cost in costs:
        assert cost.device_bytes <= 1.1 * cost.ideal_device_bytes, cost
        assert cost.products <= 1.05 * cost.ideal_products, cost
        assert cost.exponentials <= 1.05 * cost.ideal_exponentials, cost


def test_metal_costs_record_is_of_these_kernels():
    """Whoever changes them records again: examples/benchmarks/metal_costs.py --record."""
    record = json.loads((EXAMPLES / "benchmarks" / "metal_costs.json").read_text())
    assert all(row["device_bytes"] <= 1.1 * row["ideal_device_bytes"] for row in record)
    assert all(row["products"] <= 1.05 * row["ideal_products"] for row in record)


def test_doctor(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert f"jflash {jflash.__version__}" in printed
    # Here both dtypes are served alike: one by default, all others if named or not.
    _, served = printed.split("a call in bfloat16 or float32, ")
    assert served.count("serves, by default") == 1
    assert served.count("  metal: ") == 1
    assert "reference: serves, if named" in printed
    assert ("native library of metal: loaded" in printed) == (_ffi.available() is None)


def test_doctor_reports_the_platforms_of_apple_gpus(capsys, monkeypatch):
    """The version of jax-graft, and that of the library which it runs."""
    there = {"jax-graft": "0.0.5", "metal-pjrt-core": "0.0.6"}
    monkeypatch.setattr("jflash._versions.installed", lambda package: there.get(package))
    doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["jax-graft 0.0.5", "metal-pjrt-core 0.0.6"]


def test_doctor_on_machines_with_a_gpu(capsys, monkeypatch):
    """It lists dtypes apart where they are served differently, and notices a GPU that JAX does not see."""
    monkeypatch.setattr("shutil.which", lambda name: name == "nvidia-smi" or None)
    doctor.main([])
    assert "JAX sees only the CPU: pip install 'jax[cuda13]'" in capsys.readouterr().out
    monkeypatch.setattr(_platform, "current", lambda: Platform("METAL", "Apple M3", None, None))
    monkeypatch.setattr(doctor, "_verdicts", lambda dtype: iter([f"  xla: {dtype}"]))
    doctor.main([])
    printed = capsys.readouterr().out
    assert "JAX sees only the CPU" not in printed
    assert printed.count("with heads of 64 and no options") == 2


@cover(0)
def test_selfcheck(capsys):
    assert doctor.main(["--selfcheck"]) == 0
    printed = capsys.readouterr().out
    for name in ("xla", "reference"):
        assert len(re.findall(rf"ok +{name}, .*out .* d_key .* d_query .* d_value ", printed)) == 6
    assert ("ok    metal, float16 d64 all options" in printed) == (_ffi.available() is None)
    assert re.search(r"(\d+) of \1 are ok", printed)


@cover(0)
def test_doctor_notices_a_wrong_attention(capsys, monkeypatch):
    attention = jflash.attention
    wrong = lambda query, **options: attention(query * (1 + 0.01 * (options["implementation"] == "xla")), **options)
    monkeypatch.setattr(_ffi, "available", lambda: "not asked")
    monkeypatch.setattr("jflash.attention", wrong)
    assert doctor.main(["--selfcheck"]) == 1
    assert "WRONG xla, float32 d32 causal: out" in capsys.readouterr().out


@cover(0)
def test_doctor_goes_on_after_a_failure(capsys, monkeypatch):
    attention = jflash.attention

    def failing(*args, implementation, **options):
        if implementation == "xla":
            raise RuntimeError("the kernel does not compile")
        return attention(*args, implementation=implementation, **options)

    monkeypatch.setattr("jflash.attention", failing)
    monkeypatch.setattr(_ffi, "available", lambda: "not asked")
    assert doctor.main(["--selfcheck"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG xla, ") == printed.count(": RuntimeError: the kernel does not compile") == 6
    assert printed.count("ok    reference, ") == 6
