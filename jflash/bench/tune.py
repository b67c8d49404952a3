"""The search for the fastest tiles: each choice that the cases leave open is made by timing all its candidates."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.box
from rich.table import Table

from jflash import _platform, _tuning
from jflash._tuning import TuningKey
from jflash.bench import clocks, peers
from jflash.bench.cases import Case, Work, data, flops
from jflash.bench.in_jax import function_of_arrays
from jflash.bench.report import short

MARGIN = 0.03
"""The part of its time by which a candidate must be faster than the backend's own choice: less is noise."""


@dataclasses.dataclass(frozen=True)
class Open:
    """A choice that is open, and the largest of the cases that leave it open."""

    key: TuningKey
    candidates: tuple[Any, ...]
    """The candidates, the backend's own choice first."""
    case: Case
    work: Work


@dataclasses.dataclass(frozen=True)
class Found:
    """A choice that was made."""

    open: Open
    times: tuple[float, ...]
    """The median time of the case with each candidate, in milliseconds."""

    @property
    def fastest(self) -> int:
        """The fastest candidate's place: the first, if no other is faster by `MARGIN`."""
        place = min(range(len(self.times)), key=self.times.__getitem__)
        return place if self.times[place] < (1 - MARGIN) * self.times[0] else 0

    @property
    def tiles(self) -> Any:
        """The fastest candidate."""
        return self.open.candidates[self.fastest]


def tune(cases: Sequence[Case], rounds: int, step: Callable[[str, int], None]) -> list[Found]:
    """Make every choice that the cases leave open, one after the other.

    `step` is told what comes next, and of how many.
    """
    left_open = list(_left_open(cases))
    steps = sum(len(choice.candidates) for choice in left_open)
    answers: dict[TuningKey, Any] = {}
    found: list[Found] = []
    for choice in left_open:
        samples: list[list[float]] = [[] for _ in choice.candidates]
        prepared: list[clocks.Prepared] = []
        arrays = data(choice.case)
        for tiles in choice.candidates:
            step(f"{choice.key.kind}, {choice.case.name}", steps)
            function, arguments = function_of_arrays(choice.case, choice.work, arrays)
            with _tuning.trying({**answers, choice.key: tiles}):
                # Without this, what was traced with the tiles before would be found again.
                jax.clear_caches()
                prepared.append(clocks.prepare(function, *arguments))
        for _ in range(rounds):
            for one, taken in zip(prepared, samples, strict=True):
                taken += one.sample()
        found.append(Found(choice, tuple(statistics.median(taken) for taken in samples)))
        answers[choice.key] = found[-1].tiles
    return found


def _left_open(cases: Sequence[Case]) -> Iterator[Open]:
    """Return the choices with more than one candidate, each with the case that has the most to compute."""
    seen: set[TuningKey] = set()
    for case in sorted(cases, key=lambda case: -flops(case, "fwd")):
        arrays = data(case)
        for work in ("fwd", "fwd+bwd", "jvp") if case.has_backward else ("fwd",):
            function, arguments = function_of_arrays(case, work, arrays)
            with _tuning.trying({}) as trial:
                jax.clear_caches()
                jax.eval_shape(function, *arguments)
            for key, candidates in trial.asked.items():
                if key not in seen and len(candidates) > 1:
                    yield Open(key, candidates, case, work)
            seen |= trial.asked.keys()


def store(found: Sequence[Found]) -> Path:
    """Keep what is faster than the backends' own choices, for all later calls on this device."""
    better = {one.open.key: one.tiles for one in found if one.fastest}
    versions = {name: peers.version(name) for name in ("jflash", "jax")}
    return _tuning.store(_platform.device_name(), better, dict(date=str(datetime.date.today()), **versions))


def table(found: Sequence[Found]) -> Table:
    """Return a table with a line for each choice."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, caption=f"Kept where faster by {MARGIN:.0%} or more.")
    for name in ("choice", "measured on", "own tiles", "fastest tiles"):
        table.add_column(name)
    for name in ("own\nms", "fastest\nms", "faster\nby"):
        table.add_column(name, justify="right")
    for one in found:
        choice, own, best = one.open, one.times[0], one.times[one.fastest]
        key = " ".join(map(str, (choice.key.kind, *choice.key.key)))
        gain = f"{own / best - 1:.0%}" if one.fastest else ""
        tiles = (_words(choice.candidates[0]), _words(one.tiles) if one.fastest else "the same")
        table.add_row(key, f"{choice.case.name}, {choice.work}", *tiles, short(own), short(best), gain)
    return table


def _words(tiles: Any) -> str:
    power = lambda value: f"2^{int(math.log2(value))}" if value > 2**15 and value & (value - 1) == 0 else str(value)
    return ", ".join(f"{name} {power(value)}" for name, value in dataclasses.asdict(tiles).items())
