"""Sequences split over all devices of a host: the time of every strategy, beside one device.

    python examples/benchmarks/sequences.py --output times.json
    python examples/benchmarks/sequences.py --tokens 1048576 --heads 16:16 --strategies chosen --output times.json

One sequence, heads of 128, bfloat16, random data. Everything runs in one process, in turns, by the wall clock: a call
and its results, as a program waits for them. Times are medians over the rounds. A record that exists is added to. The
picture beside it shows how many times as fast as one device each strategy is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import jflash
from jflash.bench.clocks import memory

Strategy = Literal["chosen", "ring", "all_to_all", "gather"]
ONE = "one device"
WORK = ("forward", "gradient")
"""The forward alone, and the forward with the gradients of query, key and value."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Time attention with its sequence split over all devices that JAX has."""

    tokens: tuple[int, ...] = (32768, 131072)
    """Tokens of the sequence."""
    heads: tuple[str, ...] = ("16:16", "64:8")
    """Query heads and key heads."""
    masks: tuple[Literal["causal", "full"], ...] = ("causal", "full")
    strategies: tuple[Strategy, ...] = ("chosen", "ring", "all_to_all", "gather")
    """What is timed beside one device. chosen: what jflash chooses by itself."""
    head_dim: int = 128
    rounds: int = 5
    """Calls of each program; one more comes before them, uncounted."""
    output: pathlib.Path | None = None
    """The record, as JSON, with a picture beside it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that is timed."""

    tokens: int
    heads: str
    mask: str
    head_dim: int

    @property
    def name(self) -> str:
        """What tables and pictures call it."""
        return f"{self.tokens:,} {self.mask}, {self.heads} heads"


def main(settings: Settings) -> None:
    """Time all cases, print each, and write them down."""
    console, devices = Console(highlight=False), jax.devices()
    about = f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}"
    console.print(about)
    output, rows = settings.output, list[dict[str, Any]]()
    if output is not None and output.exists():
        rows = json.loads(output.read_text())["times"]
    for tokens, heads, mask in itertools.product(settings.tokens, settings.heads, settings.masks):
        case = Case(tokens, heads, mask, settings.head_dim)
        measured = list(_measure(case, settings))
        console.print(_table(case, measured))
        again = {_identity(row) for row in measured}
        rows = [row for row in rows if _identity(row) not in again] + measured
        if output is not None:
            output.write_text(json.dumps(dict(about=about, times=rows), indent=1) + "\n")
    if output is not None:
        # Without matplotlib's version in the file, the same figures make the same file.
        picture(rows, about).savefig(output.with_suffix(".png"), dpi=100, metadata={"Software": None})


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*(field.name for field in dataclasses.fields(Case)), "strategy", "work"))


def _measure(case: Case, settings: Settings) -> Iterator[dict[str, Any]]:
    every = jax.devices()
    arrays = {count: _arrays(case, every[:count]) for count in {1, len(every)}}
    key_heads, programs = arrays[1][1].shape[2], dict[tuple[str, str], Any]()
    for strategy, work in itertools.product((ONE, *settings.strategies), WORK):
        # All-to-all gives every device some of the key heads.
        if strategy != "all_to_all" or key_heads % len(every) == 0:
            given = arrays[1 if strategy == ONE else len(every)][: 3 if work == "forward" else 4]
            programs[strategy, work] = _function(case, strategy, work), given
    lowered = [jax.jit(function).lower(*given) for function, given in programs.values()]
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(programs, pool.map(lambda program: program.compile(), lowered), strict=True))
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for count, (key, (_, given)) in itertools.product(range(settings.rounds + 1), programs.items()):
        start = time.perf_counter()
        jax.block_until_ready(compiled[key](*given))
        if count > 0:
            samples[key].append(1e3 * (time.perf_counter() - start))
    for (strategy, work), times in samples.items():
        _, held = memory(compiled[strategy, work])
        rounded = [round(sample, 4) for sample in times]
        figures = dict(ms=statistics.median(rounded), samples_ms=rounded, device_gib=round(held / 2**30, 3))
        yield dataclasses.asdict(case) | dict(strategy=strategy, work=work) | figures


def _arrays(case: Case, devices: Sequence[Any]) -> list[Any]:
    """Return a query, a key, a value and the cotangent of the output, split over the devices."""
    mesh = jax.make_mesh((len(devices),), ("context",), axis_types=(AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, PartitionSpec(None, "context"))

    def random(number: int, heads: int) -> Any:
        shape = (1, case.tokens, heads, case.head_dim)
        return jax.jit(lambda: jax.random.normal(jax.random.key(number), shape, jnp.bfloat16), out_shardings=split)()

    query_heads, key_heads = map(int, case.heads.split(":"))
    return [random(number, heads) for number, heads in enumerate((query_heads, key_heads, key_heads, query_heads))]


def _function(case: Case, strategy: str, work: str) -> Callable[..., Any]:
    named = {} if strategy in (ONE, "chosen") else dict(sequence_strategy=strategy)
    attend = functools.partial(jflash.attention, is_causal=case.mask == "causal", **named)

    def gradient(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(d_out)

    return attend if work == "forward" else gradient


def _table(case: Case, rows: list[dict[str, Any]]) -> Table:
    table = Table("strategy", "forward, ms", "gradient, ms", "forward", "gradient", "GiB on a device", title=case.name)
    by_strategy: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], {})[row["work"]] = row
    for strategy, found in by_strategy.items():
        ms = [f"{found[work]['ms']:.2f}" for work in WORK]
        faster = [f"{by_strategy[ONE][work]['ms'] / found[work]['ms']:.2f}x" for work in WORK]
        table.add_row(strategy, *ms, *faster, f"{found['gradient']['device_gib']:.2f}")
    return table


def picture(rows: list[dict[str, Any]], about: str) -> Figure:
    """Draw, for each case, how many times as fast as one device each strategy is."""
    named = [(Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)}).name, row) for row in rows]
    cases = list(dict.fromkeys(name for name, _ in named))
    strategies = [name for name in dict.fromkeys(row["strategy"] for row in rows) if name != ONE]
    times = {(name, row["strategy"], row["work"]): row["ms"] for name, row in named}
    figure = Figure(figsize=(11, 1.5 + 0.6 * len(cases)), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(WORK), sharey=True), WORK, strict=True):
        for number, strategy in enumerate(strategies):
            drawn = [name for name in cases if (name, strategy, work) in times and (name, ONE, work) in times]
            at = [cases.index(name) + 0.8 * (number / len(strategies) - 0.5) for name in drawn]
            faster = [times[name, ONE, work] / times[name, strategy, work] for name in drawn]
            axes.barh(at, faster, 0.8 / len(strategies), align="edge", label=strategy)
        axes.set(title=work, xlabel="times as fast as one device")
        axes.set_yticks(range(len(cases)), cases)
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(strategies))
    figure.suptitle(about, fontsize=10)
    return figure


if __name__ == "__main__":
    main(tyro.cli(Settings))
