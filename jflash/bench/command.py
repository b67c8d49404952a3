"""The command line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jflash import _platform
from jflash.bench import peers, pictures, record, report, tune
from jflash.bench.cases import Grid
from jflash.bench.measure import measure
from jflash.bench.peers import PEERS, Name


@dataclasses.dataclass(frozen=True)
class Settings:
    """Time attention on this machine, by jflash and by the other libraries that are installed.

    Without options it prints a table, after about three minutes on two cores of a CPU.
    """

    grid: tyro.conf.OmitArgPrefixes[Grid]
    work: tuple[Literal["fwd", "bwd", "jvp"], ...] = ("fwd", "bwd")
    """What is timed. The time of the backward is that of both together, less the forward's. jvp: forward mode."""
    peers: tuple[Name, ...] = tuple(PEERS)
    """Libraries to measure. Those that are not on this machine are listed, with the reason."""
    implementation: str | None = None
    """Measure this implementation of jflash, such as xla, and not the one that it chooses."""
    rounds: int = 3
    """Rounds of measurements; each round measures every piece of work once."""
    output: pathlib.Path | None = None
    """A folder in which to write bench.json and the pictures."""
    tune: bool = False
    """Compare no libraries: find the fastest tiles of jflash's kernels on this device, and keep them for later use."""
    source: Annotated[pathlib.Path | None, tyro.conf.arg(name="from")] = None
    """Measure nothing: show the bench.json of an earlier run. Pictures are named after this file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or read; print the table; write JSON and pictures."""
    # A peer that is not JAX needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    defaults = Settings(Grid.for_platform(_platform.current()))
    settings = tyro.cli(Settings, prog="python -m jflash.bench", args=arguments, default=defaults)
    # What an earlier run compiled would be found there, and compilation seem to take no time.
    jax.config.update("jax_enable_compilation_cache", False)
    console = Console(highlight=False)
    if settings.tune:
        _tune(settings, console)
        return
    if settings.source is not None:
        found, stem = record.read(settings.source), settings.source.stem
    else:
        found, stem = _measured(settings, console), "bench"
    report.show(console, report.table(found))
    if settings.output is None:
        return
    settings.output.mkdir(parents=True, exist_ok=True)
    if settings.source is None:
        found.write(settings.output / "bench.json")
    for path in pictures.draw(found, settings.output, stem):
        console.print(f"wrote {path}")


def _measured(settings: Settings, console: Console) -> record.Record:
    with _steps(console, "matrix product") as step:
        libraries = peers.asking_for(settings.implementation)
        cases, work = settings.grid.cases(), settings.work
        backward, forward_mode = "bwd" in work, "jvp" in work
        return measure(cases, settings.peers, backward, settings.rounds, step, libraries, forward_mode=forward_mode)


def _tune(settings: Settings, console: Console) -> None:
    # Options have choices of their own.
    cases = dataclasses.replace(settings.grid, features=True).cases()
    with _steps(console, "tracing") as step:
        found = tune.tune(cases, settings.rounds, step)
    report.show(console, tune.table(found))
    console.print(f"wrote {tune.store(found)}")


@contextlib.contextmanager
def _steps(console: Console, first: str) -> Generator[Callable[[str, int], None]]:
    """A progress bar, gone at the end; what is yielded is told what comes next, and how many steps there are in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(first)

        def step(label: str, steps: int) -> None:
            progress.update(task, total=steps, advance=1, description=label)

        yield step
