"""A run in a process of its own, which is ended if a case takes a library too long.

A compiler or a kernel that hangs cannot be interrupted from within, and one that crashes takes its process with it. So
the process that measures says what it begins, and the record on disk has all that it has finished. When the process has
to be ended, or ends by itself, that case is refused in its record, and another process goes on with what is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from jflash.bench import measure, record
from jflash.bench.cases import Case, Work
from jflash.bench.measure import Begun, Step
from jflash.bench.peers import Name


class _Stopped(NamedTuple):
    case: Case
    peer: Name
    reason: str | None
    """The reason why the process was ended; `None`: it ended by itself."""


Measuring = Callable[[Connection, bool], None]
"""A function that measures, and sends what it begins before each step.

At the end it sends None, or why nothing can be measured. The second argument is whether to go on with the record. The
function can be pickled.
"""


def measured(
    measuring: Measuring,
    path: pathlib.Path,
    resume: bool,
    limit_s: float,
    works: Callable[[Case], Sequence[Work]],
    step: Step,
) -> record.Record:
    """Return the record at the path, after all was measured or refused.

    Raises:
      ValueError: if nothing can be measured.
      RuntimeError: if a process ends before it has begun anything.
    """
    steps_before = 0
    # The process is not forked: the libraries have threads.
    processes = multiprocessing.get_context("spawn")
    while True:
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=measuring, args=(theirs, resume))
        process.start()
        theirs.close()
        with contextlib.closing(ours):
            try:
                stopped, steps_before = _watch(ours, limit_s, step, steps_before)
            finally:
                # A process that has ended by itself keeps its exit code.
                process.join(timeout=1)
                process.kill()
                process.join()
        if stopped is None:
            return record.read(path)
        reason = stopped.reason or f"The process ended with exit code {process.exitcode}."
        rows = measure.refused(stopped.case, stopped.peer, works(stopped.case), reason)
        record.read(path).with_rows(rows).write(path)
        resume = True


def _watch(connection: Connection, limit_s: float, step: Step, before: int) -> tuple[_Stopped | None, int]:
    """Listen until all is done (`None`), a case of a library has taken too long, or the process has ended.

    It also returns how many steps were begun, including those of earlier processes.
    """
    spent: dict[tuple[Case, Name], float] = {}
    begun: Begun | None = None
    number = before
    while True:
        start = time.monotonic()
        # Before the first step libraries are imported, which counts for no case.
        if begun is not None and not connection.poll(limit_s - spent[begun.case, begun.peer]):
            return _Stopped(begun.case, begun.peer, f"It took longer than {limit_s:g} s."), number
        try:
            received: Begun | str | None = connection.recv()
        except EOFError:
            if begun is None:
                raise RuntimeError("The process that measures has ended before the first case.") from None
            return _Stopped(begun.case, begun.peer, None), number
        if received is None:
            return None, number
        if isinstance(received, str):
            raise ValueError(received)
        if begun is not None:
            spent[begun.case, begun.peer] += time.monotonic() - start
        begun, number = received, number + 1
        spent.setdefault((begun.case, begun.peer), 0.0)
        step(begun._replace(steps=before + begun.steps))
