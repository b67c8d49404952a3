"""The command line of the bench."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jflash import _platform
from jflash.bench import limits, measure, peers, pictures, record, report, tune
from jflash.bench.cases import Grid
from jflash.bench.measure import Step
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
    """A folder in which to write the record, after each case, and the pictures, at the end."""
    name: str = "bench"
    """What the record, NAME.json, and the pictures are called."""
    resume: bool = False
    """Go on with the record in the output folder, if there is one: measure what it lacks, and nothing twice."""
    limit_s: float | None = None
    """Seconds that a library may take for a case, with compilation. Then it is refused, and the run goes on in another
    process. So it does if a library crashes."""
    tune: bool = False
    """Compare no libraries: find the fastest tiles of jflash's kernels on this device, and keep them for later use."""
    source: Annotated[pathlib.Path | None, tyro.conf.arg(name="from")] = None
    """Measure nothing: show the bench.json of an earlier run. Pictures are named after this file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or read a record; print the table; write JSON and pictures."""
    # A peer that is not JAX needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    defaults = Settings(Grid.for_platform(_platform.current()))
    settings = tyro.cli(Settings, prog="python -m jflash.bench", args=arguments, default=defaults)
    # A cache would have what an earlier run compiled, and compilation would seem to take no time.
    jax.config.update("jax_enable_compilation_cache", False)
    console = Console(highlight=False)
    if settings.tune:
        _tune(settings, console)
        return
    if settings.output is None and (settings.resume or settings.limit_s is not None):
        sys.exit("--resume and --limit-s need a record on disk: say where with --output.")
    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
    if settings.source is not None:
        found, stem = record.read(settings.source), settings.source.stem
    else:
        try:
            with _steps(console, "matrix product") as step:
                found, stem = _measured(settings, lambda begun: step(begun.label, begun.steps)), settings.name
        except ValueError as error:
            sys.exit(str(error))
    report.show(console, report.table(found))
    if settings.output is None:
        return
    if settings.source is None:
        console.print(f"wrote {settings.output / stem}.json")
    for path in pictures.draw(found, settings.output, stem):
        console.print(f"wrote {path}")


def _measured(settings: Settings, step: Step) -> record.Record:
    path = None if settings.output is None else settings.output / f"{settings.name}.json"
    if path is None or settings.limit_s is None:
        return _measure(settings, path, settings.resume, step)
    works = functools.partial(measure.works, backward="bwd" in settings.work, forward_mode="jvp" in settings.work)
    measuring = functools.partial(_in_process, settings, path)
    return limits.measured(measuring, path, settings.resume, settings.limit_s, works, step)


def _measure(settings: Settings, path: pathlib.Path | None, resume: bool, step: Step) -> record.Record:
    return measure.measure(
        settings.grid.cases(),
        settings.peers,
        "bwd" in settings.work,
        settings.rounds,
        step,
        peers.asking_for(settings.implementation),
        forward_mode="jvp" in settings.work,
        earlier=record.read(path) if resume and path is not None and path.exists() else None,
        keep=lambda found: None if path is None else found.write(path),
    )


def _in_process(settings: Settings, path: pathlib.Path, connection: Connection, resume: bool) -> None:
    """Do all of a run, and tell a process that watches it what comes next."""
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        _measure(settings, path, resume, connection.send)
    except ValueError as error:
        connection.send(str(error))
    else:
        connection.send(None)


def _tune(settings: Settings, console: Console) -> None:
    # The options have choices of their own.
    cases = dataclasses.replace(settings.grid, features=()).cases()
    with _steps(console, "tracing") as step:
        found = tune.tune(cases, settings.rounds, step)
    report.show(console, tune.table(found))
    console.print(f"wrote {tune.store(found)}")


@contextlib.contextmanager
def _steps(console: Console, first: str) -> Generator[Callable[[str, int], None]]:
    """Yield a function that is told what comes next and how many steps there are, and shows a progress bar, gone at the
    end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(first)

        def step(label: str, steps: int) -> None:
            progress.update(task, total=steps, advance=1, description=label)

        yield step
