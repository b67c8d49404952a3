"""Attention on the CPU in float32: the time of jflash beside jax.nn's and torch's, and jflash's temporary memory.

    python examples/benchmarks/cpu.py --output cpu.json
    python examples/benchmarks/cpu.py --lengths 64 128 256 512 1024 --long 1024 --peers jax.nn --output cpu-small.json

Everything runs in one process, in turns: each round measures every case once, and a case's time is its median over the
rounds. Each ratio is printed with the two times that it is made of. torch takes part where it is installed.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import rich.box
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jflash
from jflash import _platform, _tuning
from jflash.bench.clocks import wall_clock

HEADS, HEAD_DIM = 8, 64
NARROW = "window 256"
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    NARROW: {"local_window_size": 256},
}
WORK = ("fwd", "fwd+bwd")
SMALL = (64, 128, 256, 512, 1024)
GOALS = {
    **{(f"jax.nn / jflash{mask}", tokens): ("≥ 1", "≥ 1") for mask in ("", ", causal") for tokens in SMALL},
    ("jax.nn / jflash", 4096): ("≥ 5", "≥ 4"),
    ("torch / jflash, full", 4096): ("≥ 0.8", "≥ 0.8"),
    ("torch / jflash, causal", 4096): ("≥ 0.8", "≥ 0.8"),
    ("causal / full", 4096): ("≤ 0.6", "≤ 0.6"),
    ("full / window 256", 16384): ("≥ 15", "≥ 15"),
    ("memory / q+k+v+out", 16384): ("≤ 1", "≤ 3"),
    ("memory, tokens doubled", 16384): ("≤ 2.1", "≤ 2.1"),
}
"""The ratios that are asked for at a number of tokens, for each kind of work."""

Peer = Literal["jax.nn", "torch"]


class Case(NamedTuple):
    """Something to measure."""

    who: str
    tokens: int
    mask: str
    work: str


class Comparison(NamedTuple):
    """Two cases of the same tokens and work, whose times are to be divided."""

    name: str
    dividend: Case
    divisor: Case


class Ratio(NamedTuple):
    """A row of the table."""

    name: str
    tokens: int
    work: str
    dividend: float
    divisor: float
    unit: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measure attention on the CPU: batch 1, 8 heads of 64, float32, random data."""

    lengths: tuple[int, ...] = (512, 4096)
    """Tokens at which jflash is compared with its peers, and causal with full."""
    long: int = 16384
    """Tokens at which a window of 256 keys to each side is compared with full, and memory is looked at."""
    rounds: int = 5
    """Measurements of each case."""
    peers: tuple[Peer, ...] = ("jax.nn", "torch")
    """The libraries to compare with."""
    output: pathlib.Path | None = None
    """Where to write all figures, as JSON."""


def comparisons(settings: Settings) -> list[Comparison]:
    """The table's times."""
    pairs = {
        "jax.nn / jflash": (("jax.nn", "full"), ("jflash", "full"), settings.lengths),
        "jax.nn / jflash, causal": (("jax.nn", "causal"), ("jflash", "causal"), settings.lengths),
        "torch / jflash, full": (("torch", "full"), ("jflash", "full"), settings.lengths),
        "torch / jflash, causal": (("torch", "causal"), ("jflash", "causal"), settings.lengths),
        "causal / full": (("jflash", "causal"), ("jflash", "full"), settings.lengths),
        f"full / {NARROW}": (("jflash", "full"), ("jflash", NARROW), (settings.long,)),
    }
    return [
        Comparison(name, *(Case(who, tokens, mask, work) for who, mask in (dividend, divisor)))
        for name, (dividend, divisor, lengths) in pairs.items()
        if dividend[0] in ("jflash", *settings.peers)
        for tokens in lengths
        for work in WORK
    ]


@functools.cache
def data(tokens: int) -> tuple[np.ndarray, ...]:
    """Query, key, value and the output's cotangent, `[1, tokens, HEADS, HEAD_DIM]`."""
    random = np.random.default_rng(0)
    return tuple(random.standard_normal((1, tokens, HEADS, HEAD_DIM), np.float32) for _ in range(4))


def jax_function(case: Case) -> Callable[..., Any]:
    """The case's work as a function of the first three, or all, of `data`."""
    attend = {"jflash": jflash.attention, "jax.nn": jax.nn.dot_product_attention}[case.who]
    forward = functools.partial(attend, **OPTIONS[case.mask])
    if case.work == "fwd":
        return forward

    def forward_and_backward(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, pull_back = jax.vjp(forward, query, key, value)
        return out, pull_back(cotangent)

    return forward_and_backward


def operands(case: Case) -> tuple[np.ndarray, ...]:
    """Return the arrays that the case's work takes of `data`."""
    return data(case.tokens)[: 3 if case.work == "fwd" else 4]


def jax_call(case: Case) -> Callable[[], object]:
    """Do the case's work once, and wait for it."""
    arrays = [jax.device_put(array) for array in operands(case)]
    compiled = jax.jit(jax_function(case)).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def torch_call(case: Case) -> Callable[[], object]:
    """Do the same in torch, which is synchronous on the CPU; its layout is `[B, N, T, H]`."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    arrays = [torch.from_numpy(np.ascontiguousarray(array.swapaxes(1, 2))) for array in operands(case)]
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **OPTIONS[case.mask])
    if case.work == "fwd":
        return lambda: attend(*arrays)
    *inputs, cotangent = arrays
    for array in inputs:
        array.requires_grad_()

    def forward_and_backward() -> object:
        out = attend(*inputs)
        return out, torch.autograd.grad(out, inputs, cotangent)

    return forward_and_backward


def measure(cases: Sequence[Case], rounds: int, console: Console) -> dict[Case, list[float]]:
    """Milliseconds of every case in every round."""
    calls = {case: (torch_call if case.who == "torch" else jax_call)(case) for case in cases}
    for call in calls.values():
        call()
    samples = {case: wall_clock(call) for case, call in calls.items()}
    taken: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in track(range(rounds), "rounds", console=console):
        for case, sample in samples.items():
            taken[case] += sample()
    return taken


def temporary_bytes(tokens: int, work: str) -> int:
    """Return the bytes that a compiled call needs besides its arguments and results."""
    arrays = [jax.ShapeDtypeStruct((1, tokens, HEADS, HEAD_DIM), np.float32)] * (3 if work == "fwd" else 4)
    compiled = jax.jit(jax_function(Case("jflash", tokens, "full", work))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def memory_ratios(tokens: int) -> list[Ratio]:
    """Temporary memory as a multiple of query, key, value and output, and its growth when the tokens double."""
    once, twice = ([temporary_bytes(length, work) / 2**20 for work in WORK] for length in (tokens, 2 * tokens))
    size = 4 * data(tokens)[0].nbytes / 2**20
    return [
        *(
            Ratio("memory / q+k+v+out", tokens, work, mebibytes, size, "MiB")
            for work, mebibytes in zip(WORK, once, strict=True)
        ),
        *(
            Ratio("memory, tokens doubled", tokens, work, more, less, "MiB")
            for work, less, more in zip(WORK, once, twice, strict=True)
        ),
    ]


def table(ratios: Sequence[Ratio], caption: str) -> Table:
    """A row for each ratio."""
    title = f"Attention on the CPU, float32, batch 1, {HEADS} heads of {HEAD_DIM}"
    table = Table(title=title, caption=caption, box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in ("ratio", "goal", "of", "tokens", "work", "made of"):
        table.add_column(column, justify="left" if column in ("of", "work") else "right")
    for name, rows in itertools.groupby(ratios, key=lambda row: row.name):
        for row in rows:
            over, under = (f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" for figure in row[3:5])
            ratio = f"{row.dividend / row.divisor:.2f}"
            goal = dict(zip(WORK, GOALS.get((name, row.tokens), ("", "")), strict=True))[row.work]
            table.add_row(ratio, goal, name, f"{row.tokens:,}", row.work, f"{over} / {under} {row.unit}")
        table.add_section()
    return table


def main(settings: Settings) -> None:
    """Measure, print the table, write the figures."""
    jax.config.update("jax_platforms", "cpu")
    console = Console(highlight=False)
    versions = {name: importlib.metadata.version(name) for name in ("jflash", "jax", "jaxlib")}
    versions["python"] = platform.python_version()
    if _tuning.is_tuned(_platform.device_name()):
        versions["tiles"] = "tuned"
    versions["torch"] = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else "missing"
    if versions["torch"] == "missing":
        settings = dataclasses.replace(settings, peers=tuple(peer for peer in settings.peers if peer != "torch"))

    wanted = comparisons(settings)
    cases = {case for row in wanted for case in (row.dividend, row.divisor)}
    samples = measure(sorted(cases, key=lambda case: (*case[1:], case.who)), settings.rounds, console)
    ratios: list[Ratio] = []
    for name, dividend, divisor in wanted:
        over, under = (statistics.median(samples[case]) for case in (dividend, divisor))
        ratios.append(Ratio(name, dividend.tokens, dividend.work, over, under, "ms"))
    ratios += memory_ratios(settings.long)

    about = f"{datetime.date.today()}, {_platform.device_name()}, median of {settings.rounds} rounds; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )
    served = jflash.explain(*data(settings.long)[:3])
    console.print(table(ratios, f"{about}.\n{served}"))
    if settings.output is not None:
        record = dict(
            about=about,
            explain=served,
            ratios=[dict(row._asdict(), ratio=row.dividend / row.divisor) for row in ratios],
            samples=[dict(case._asdict(), ms=taken) for case, taken in samples.items()],
        )
        settings.output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
