"""`python -m jflash.bench`: what it counts, what it records, and that nothing in a record is invented."""

import contextlib
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler
from short_run import cover

import jflash
from jflash.bench import __main__ as bench
from jflash.bench import cases, clocks, measure, peers, record, report, score_mods

ROOT = Path(__file__).parents[2]
RECORDS = [path for path in (ROOT / "examples" / "benchmarks").glob("*.json") if '"rows"' in path.read_text()]
PLAIN = cases.square("full", "float32", 2, 12, 2, 16)


def only_full(query, key, value, is_causal=False, implementation=None):
    """A peer that refuses some cases when they are tried."""
    if is_causal:
        raise NotImplementedError("Causal is not for me.\nSecond line.")
    return jax.nn.dot_product_attention(query, key, value)


def test_what_a_peer_takes_for_a_score_mod():
    case = lambda name: dataclasses.replace(PLAIN, score_mod=name)
    refusal = lambda peer, name: peers.PEERS[peer].refuses(case(name), ("query", "key", "value"))
    for name in score_mods.SCORE_MODS:
        assert refusal("jflash", name) is None
        assert (refusal("jax.nn", name) is None) == (name != "soft cap")
    assert refusal("jax.nn", "soft cap") == "It has no argument score_mod, logits_soft_cap."
    # A library with neither a bias nor a cap.
    assert peers.InJax("jax", lambda: only_full).refuses(case("scalar"), ()) == "It has no argument score_mod, bias."
    assert peers.PEERS["jflash"].serving(case("relative"), cases.data(case("relative"))) in ("xla", "mosaic_gpu")


@contextlib.contextmanager
def two_peers_less():
    """Make cuDNN not installed, and tokamax refuse what is causal; samples are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peers.PEERS, "cuDNN", dataclasses.replace(peers.PEERS["cuDNN"], package="no_such_package"))
        patch.setitem(peers.PEERS, "tokamax", peers.InJax("jax", lambda: only_full))
        patch.setattr(clocks, "SAMPLE_MS", 1)
        patch.setattr(clocks, "REST_S", 0)
        patch.setenv("COLUMNS", "160")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return what a tiny run wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    options = {"lengths": 64, "widths": 32, "head-dims": 16, "tokens": 64, "dtype": "float32", "rounds": 2}
    with two_peers_less(), contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main([*(f"--{name}={value}" for name, value in options.items()), f"--output={folder}"])
    return folder, printed.getvalue()


def test_version_of_what_was_never_installed(nothing_installed):
    """A checkout on the path; the run must not fail for it, after all was measured."""
    assert peers.versions(["jflash"])["jflash"] == "from a folder on the path"


def test_run_records_every_case_and_peer(run):
    found = json.loads((run[0] / "bench.json").read_text())
    assert found["about"]["versions"]["jflash"] == jflash.__version__
    assert found["product"]["tflops"] == pytest.approx(2 * found["product"]["size"] ** 3 / found["product"]["ms"] / 1e9)
    rows = {(row["case"], row["peer"], row["work"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    for case, peer in itertools.product(("full", "causal"), ("jflash", "jax.nn")):
        forward, backward, both = (rows[case, peer, work] for work in ("fwd", "bwd", "fwd+bwd"))
        assert backward["ms"] == pytest.approx(both["ms"] - forward["ms"])
        for row in (forward, both):
            assert len(row["samples_ms"]) == 2
            assert row["ms"] == pytest.approx(np.median(row["samples_ms"]), rel=1e-5)
            assert row["compile_s"] > 0
            assert row["peak_mib"] > row["temporary_mib"] >= 0
            assert row["fraction"] == pytest.approx(row["tflops"] / found["product"]["tflops"])
        pairs = 64 * 64 / (2 if case == "causal" else 1)
        assert forward["tflops"] == pytest.approx(2 * (16 + 16) * pairs * 2 / forward["ms"] / 1e9)


@cover(0)
def test_peers_do_the_same_work_one_after_the_other_and_take_turns_at_being_first(monkeypatch):
    """A GPU's clock depends on what it did just before. What a case has given is kept before the next one begins."""
    done: list[tuple[str, str, str]] = []
    monkeypatch.setattr(measure._Turn, "sample", lambda turn: done.append((turn.case.name, turn.work, turn.peer)))
    monkeypatch.setattr(measure._Turn, "figures", lambda turn: record.Figures(refusal="not timed"))
    monkeypatch.setattr(
        measure, "_turn", lambda case, peer, _, work, __: measure._Turn(case, peer, work, None, "not compiled")
    )
    grid = [PLAIN, dataclasses.replace(PLAIN, name="causal", is_causal=True)]
    rows = measure.measure(grid, ["jflash", "jax.nn"], True, 3, lambda *_: None).rows
    assert [(row.case, row.peer) for row in rows[::3]] == [(c.name, p) for c in grid for p in ("jflash", "jax.nn")]
    groups = [done[at : at + 2] for at in range(0, len(done), 2)]
    names, rounds = (case.name for case in grid), range(3)
    assert [group[0][:2] for group in groups] == [
        (name, work) for name, _, work in itertools.product(names, rounds, ("fwd", "fwd+bwd"))
    ]
    assert all(first[:2] == second[:2] for first, second in groups)
    for number, (first, second) in enumerate(groups):
        assert (first[2], second[2]) == (("jflash", "jax.nn"), ("jax.nn", "jflash"))[number // 2 % 3 % 2]


@cover(0)
def test_a_run_that_was_cut_off_goes_on_with_what_it_has(monkeypatch):
    monkeypatch.setattr(clocks, "SAMPLE_MS", 1)
    monkeypatch.setattr(clocks, "REST_S", 0)
    grid = [PLAIN, *(dataclasses.replace(PLAIN, name=name, score_mod=name) for name in ("relative", "soft cap"))]
    kept = []

    def keep(found):
        kept.append(found)
        if len(kept) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        measure.measure(grid, ["jflash"], True, 1, lambda _: None, keep=keep)
    assert [len(found.rows) for found in kept] == [0, 3, 6]
    begun = []
    found = measure.measure(grid, ["jflash", "jax.nn"], True, 1, begun.append, earlier=kept[-1])
    asked = {(step.case.name, step.peer) for step in begun}
    assert asked == {(case.name, "jax.nn") for case in grid} | {("soft cap", "jflash")}
    assert {step.steps for step in begun} == {len(begun)}
    assert [(row.case, row.peer) for row in found.rows[::3]] == [
        (case.name, peer) for case in grid for peer in ("jflash", "jax.nn")
    ]
    assert [row for row in found.rows if row in kept[-1].rows] == [*kept[-1].rows]
    assert found.product == kept[-1].product
    refusals = {(row.case, row.peer): row.figures.refusal for row in found.rows if row.figures.refusal is not None}
    assert refusals == {("soft cap", "jax.nn"): "It has no argument score_mod, logits_soft_cap."}
    again = []
    assert measure.measure(grid, ["jflash"], True, 1, again.append, earlier=found) == found
    assert again == []
    other = dataclasses.replace(found, about=dataclasses.replace(found.about, device="another GPU"))
    with pytest.raises(ValueError, match=r"figures would not compare\. Got device .*, was another GPU"):
        measure.measure(grid, ["jflash"], True, 1, lambda _: None, earlier=other)


@cover(0)
def test_forward_mode(monkeypatch):
    """Forward mode has columns of its own where it is asked for, and a peer that has none says so."""
    monkeypatch.setattr(clocks, "SAMPLE_MS", 1)
    monkeypatch.setattr(clocks, "REST_S", 0)
    libraries = {**peers.PEERS, "torch": Forwards()}
    found = measure.measure([PLAIN], ["jflash", "torch"], False, 1, lambda *_: None, libraries, forward_mode=True)
    rows = {(row.peer, row.work): row for row in found.rows}
    assert rows.keys() == {(peer, work) for peer in ("jflash", "torch") for work in ("fwd", "jvp")}
    own = rows["jflash", "jvp"]
    assert own.tflops == pytest.approx(cases.flops(PLAIN, "jvp") / own.figures.ms / 1e9)
    assert rows["torch", "jvp"].figures.refusal == "NotImplementedError: no forward mode"
    assert [str(column.header) for column in report.table(found).columns].count("jvp\nms") == 1


class Forwards(peers.InJax):
    """A peer without forward mode."""

    def __init__(self) -> None:
        super().__init__("jax", lambda: jax.nn.dot_product_attention)

    def prepare(self, case, work, data):
        if work == "jvp":
            raise NotImplementedError("no forward mode")
        return super().prepare(case, work, data)


def test_missing_peer_is_listed_and_has_no_row(run):
    found = record.read(run[0] / "bench.json")
    assert found.about.missing["cuDNN"] == "no_such_package is not installed."
    assert "cuDNN is missing: no_such_package is not installed." in run[1]
    assert "cuDNN" not in {row.peer for row in found.rows}


def test_refused_case_is_recorded_with_its_sentence(run):
    rows = [row for row in record.read(run[0] / "bench.json").rows if row.peer == "tokamax"]
    for row in rows:
        refusal = "NotImplementedError: Causal is not for me." if row.case == "causal" else None
        assert row.figures.refusal == refusal
        assert (row.figures.ms is None) == (refusal is not None)
        # Of a call as small as this one a difference of two times may come out negative.
        differs = row.work == "bwd" and row.figures.ms is not None and row.figures.ms <= 0
        assert (row.tflops is None) == (refusal is not None or differs)
    assert {row.case for row in rows} == {"full", "causal"}
    assert re.search(r"tokamax refuses causal: .*: NotImplementedError: Causal is not for me\.", run[1])


def test_nothing_is_cut_off_where_lines_are_short(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main(["--from", str(run[0] / "bench.json")])
    assert "…" not in printed.getvalue()
    assert "causal: 1 x 64, 2 x d16 " in printed.getvalue()


@cover(0)
def test_an_implementation_that_is_asked_for_is_measured(monkeypatch, tmp_path):
    """The implementation that is asked for is measured, not the one that jflash would choose; an unknown name is an
    error."""
    options = {"lengths": 64, "widths": 32, "head-dims": 16, "tokens": 64, "masks": "full", "work": "fwd", "rounds": 1}
    command = [*(f"--{name}={value}" for name, value in options.items()), "--peers=jflash"]
    monkeypatch.setattr(clocks, "SAMPLE_MS", 1)
    monkeypatch.setattr(clocks, "REST_S", 0)
    with contextlib.redirect_stdout(io.StringIO()):
        bench.main([*command, f"--output={tmp_path}", "--implementation=reference"])
        (row,) = record.read(tmp_path / "bench.json").rows
        with pytest.raises(SystemExit, match="must name some of"):
            bench.main([*command, "--implementation=referents"])
    assert (row.peer, row.implementation, row.figures.refusal) == ("jflash", "reference", None)
    # It has a [T, S] array of each head, and `xla` has not.
    case = dataclasses.replace(PLAIN, queries=1024, keys=1024)
    plain, tiled = (
        peers.asking_for(name)["jflash"].prepare(case, "fwd", cases.data(case)).figures.temporary_mib
        for name in ("reference", "xla")
    )
    assert plain > 2 * tiled


def test_what_a_peer_has_no_argument_for_is_asked_not_tried():
    capped = dataclasses.replace(PLAIN, soft_cap=1.0)
    names = ("query", "key", "value", *cases.options(capped))
    assert peers.PEERS["jflash"].refuses(capped, names) is None
    for peer in ("jax.nn", "torch"):
        assert peers.PEERS[peer].refuses(capped, names) == "It has no argument logits_soft_cap."
    assert peers.PEERS["cuDNN"].refuses(PLAIN, ()) == "It takes bfloat16 and float16, not float32."


def test_more_memory_than_there_is_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setattr(clocks, "_memory_limit", lambda: 100)
    with pytest.raises(MemoryError, match=r"It needs .* GiB, and there are"):
        clocks.prepare(jnp.sin, jnp.zeros(1000))


def test_kernel_times_are_those_of_every_iteration_after_the_first(monkeypatch):
    """Kernel times come from CUPTI on an NVIDIA GPU; elsewhere something stands in for it."""
    if not clocks.on_nvidia():

        def stand_in(compiled, aggregate, iterations):
            assert aggregate
            times = [*[9.0] * clocks.WARM_UP, *[0.25] * (iterations - clocks.WARM_UP)]
            return lambda *arrays: (compiled(*arrays), times)

        monkeypatch.setattr(profiler, "measure", stand_in)
        monkeypatch.setattr(clocks, "on_nvidia", lambda: True)
    samples = clocks.prepare(jnp.dot, jnp.ones((16, 16)), jnp.ones((16, 16))).sample()
    assert len(samples) == clocks.ITERATIONS
    assert min(samples) > 0
    assert max(samples) < 9


@cover(0)
def test_pictures_are_drawn_again_from_a_record(run, tmp_path):
    drawn = {path.name: path.read_bytes() for path in run[0].glob("*.png")}
    assert set(drawn) == {"bench-forward.png", "bench-backward.png"}
    with two_peers_less(), contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main(["--from", str(run[0] / "bench.json"), "--output", str(tmp_path)])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == drawn
    assert all(image.startswith(b"\x89PNG\r\n\x1a\n") for image in drawn.values())
    table = lambda text: text[: text.index("wrote ")].strip()
    assert table(printed.getvalue()) == table(run[1])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_kept_records_are_of_this_schema(path, tmp_path):
    found = record.read(path)
    found.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    for row in found.rows:
        assert row.tflops is None or row.tflops > 0
        assert (row.fraction is None) == (found.product is None or row.tflops is None)


PEERS = {"cuDNN": "cuDNN", "tokamax": "tokamax", "FlashAttention-4": "FA4"}
"""The libraries that the pages compare with, and their names in tables."""


def test_the_figures_for_hopper_are_recorded():
    rows = record.read(ROOT / "examples" / "benchmarks" / "h100.json").rows
    tflops = {(r.head_dim, r.queries, r.case, r.work, r.peer): r.tflops for r in rows if not r.is_feature}
    options = {(r.case, r.work, r.peer): r.tflops for r in rows if r.is_feature}
    sections = re.split(r"^(?=#)", (ROOT / "examples" / "benchmarks" / "hopper.md").read_text(), flags=re.MULTILINE)
    page = next(section for section in sections if section.startswith("# Speed on NVIDIA Hopper\n"))

    def figure(figures: Mapping[tuple[Any, ...], float | None], *place: Any) -> str:
        ours = figures.get((*place, "jflash"))
        if ours is None:
            return "-"
        found = {short: figures.get((*place, who)) for who, short in PEERS.items()}
        ratios = [f"{ours / theirs:.2f}x {short}" for short, theirs in found.items() if theirs is not None]
        return f"{ours:.0f} ({', '.join(ratios)})" if ratios else f"{ours:.0f}"

    table = re.findall(r"^\| (\d+) \| ([\d,]+) \|(.*)\|$", page, re.MULTILINE)
    assert table
    for dim, tokens, given in table:
        columns = itertools.product(("fwd", "bwd"), ("full", "causal"))
        place = int(dim), int(tokens.replace(",", ""))
        expected = [figure(tflops, *place, mask, work) for work, mask in columns]
        assert [one.strip() for one in given.split("|")] == expected
    for case in {case for case, *_ in options}:
        expected = [figure(options, case, work) for work in ("fwd", "bwd")]
        assert f"| {case} | {' | '.join(expected)} |\n" in page


def ratios(name: str, work: str, peer: str) -> list[float]:
    """Return jflash's speed relative to a peer's in the cells of a record's grid."""
    rows = record.read(ROOT / "examples" / "benchmarks" / f"{name}.json").rows
    rates = {(row.call, row.peer): row.tflops for row in rows if row.work == work and not row.is_feature}
    return [ours / rates[call, peer] for (call, of), ours in rates.items() if of == "jflash"]


def span(found: list[float]) -> str:
    return f"{min(found):.2f}\N{EN DASH}{max(found):.2f}\N{MULTIPLICATION SIGN}"


def words(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_ratios_for_hopper_are_recorded(name: str):
    page = words("examples/benchmarks/hopper.md")
    forward, backward = ({peer: span(ratios(name, work, peer)) for peer in PEERS} for work in ("fwd", "bwd"))
    assert f"{forward['cuDNN']} as fast as cuDNN forward and {backward['cuDNN']} backward" in page
    for peer in ("tokamax", "FlashAttention-4"):
        assert f"{forward[peer]} and {backward[peer]} as fast as {peer}" in page


def test_the_record_of_the_current_kernels_is_quoted():
    """The README has the ratios to cuDNN, and the page says in how many cells another library is ahead."""
    forward, backward = (span(ratios("h100", work, "cuDNN")) for work in ("fwd", "bwd"))
    assert f"jflash is {forward} as fast as cuDNN forward and {backward} backward" in words("README.md")
    every = [ratio for work in ("fwd", "bwd") for ratio in ratios("h100", work, "FlashAttention-4")]
    ahead = f"FlashAttention-4 is ahead in {sum(ratio < 1 for ratio in every)} of {len(every)} cells"
    assert ahead in words("examples/benchmarks/hopper.md")


def test_the_figure_for_float32_is_recorded():
    rows = record.read(ROOT / "examples" / "benchmarks" / "h100-float32.json").rows
    tflops = {(row.call, row.work, row.peer): row.tflops for row in rows}

    def times(work: str) -> str:
        ours = {call: rate for (call, of, peer), rate in tflops.items() if (of, peer) == (work, "jflash")}
        theirs = {call: tflops[call, work, "jax.nn"] for call in ours}
        ratios = [rate / theirs[call] for call, rate in ours.items() if theirs[call] is not None]
        return span(ratios)

    readme = words("README.md")
    assert f"it is {times('fwd')} as fast as jax.nn's attention forward and {times('bwd')} backward" in readme


def test_a_record_to_go_on_with_has_a_place():
    with pytest.raises(SystemExit, match="say where with --output"):
        bench.main(["--resume"])


def test_what_cannot_be_measured_is_said_in_a_sentence():
    with pytest.raises(SystemExit, match=r"^A head dimension is written as 128, or as 192/128 .* Got 'wide'\.$"):
        bench.main(["--head-dims=wide"])


def test_what_to_install_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(bench, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(SystemExit, match=r"needs no_such_package: pip install '\.\[benchmark\]'"):
        bench.main([])
