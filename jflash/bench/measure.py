"""The measurement of one case after the other by every peer, in turns.

Each round does all of a case's work once, so that a machine's moods are shared fairly. What a case has given is kept
before the next one begins.

What a GPU has just done decides how fast it is: a clock that was lowered for want of power stays low for some tens of
milliseconds. So the peers do the same work one after the other, and in each round another one is the first.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jflash import _platform, _tuning
from jflash.bench import clocks
from jflash.bench.cases import Case, Data, Work, data, options
from jflash.bench.peers import PEERS, Name, Peer, versions
from jflash.bench.record import About, Figures, Product, Record, Row


class Begun(NamedTuple):
    """A step that comes next."""

    label: str
    steps: int
    """The number of steps in all."""
    case: Case
    peer: Name


Step = Callable[[Begun], None]


@dataclasses.dataclass
class _Turn:
    """Some work of a case by a peer, and what has come of it."""

    case: Case
    peer: Name
    work: Work
    implementation: str | None
    done: clocks.Prepared | str
    """The work, or why it was refused."""
    samples: list[float] = dataclasses.field(default_factory=list[float])

    def sample(self) -> None:
        if isinstance(self.done, clocks.Prepared):
            samples = _attempt(self.done.sample)
            if isinstance(samples, str):
                self.done = samples
            else:
                self.samples += samples

    def figures(self) -> Figures:
        return Figures(refusal=self.done) if isinstance(self.done, str) else clocks.timed(self.done, self.samples)


def measure(
    cases: Sequence[Case],
    peers: Sequence[Name],
    backward: bool,
    rounds: int,
    step: Step,
    libraries: Mapping[Name, Peer] = PEERS,
    *,
    forward_mode: bool = False,
    earlier: Record | None = None,
    keep: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Return all figures. Peers that are not here are listed with the reason.

    Args:
      earlier: what a run that was cut off has measured already.
      keep: a function that is given the record before the first case and after each.

    Raises:
      ValueError: if figures would not compare with the earlier ones.
    """
    here = _platform.current()
    reasons: dict[Name, str | None] = {name: libraries[name].missing(here) for name in peers}
    present: list[Name] = [name for name, reason in reasons.items() if reason is None]
    device = _platform.device_name()
    about = About(
        date=str(datetime.date.today()),
        device=device,
        clock=f"{clocks.clock_name()}, median of {rounds} round{'s' * (rounds > 1)}",
        versions=versions(present) | ({"tiles": "tuned"} if _tuning.is_tuned(device) else {}),
        missing={name: reason for name, reason in reasons.items() if reason is not None},
    )
    record = Record(about, _product(rounds), ()) if earlier is None else earlier.continued(about, present)
    keep(record)
    ceiling = None if record.product is None else record.product.tflops
    left: list[tuple[Case, tuple[Work, ...], list[Name]]] = []
    for case in cases:
        done = works(case, backward, forward_mode)
        left.append((case, done, [peer for peer in present if not record.has(case, peer, done)]))
    steps = (1 + rounds) * sum(len(done) * len(lacking) for _, done, lacking in left)
    for case, done, lacking in left:
        if not lacking:
            continue
        arrays = data(case)
        turns: list[_Turn] = []
        for peer in lacking:
            for work in done:
                step(Begun(f"compile {peer}, {case.name}", steps, case, peer))
                turns.append(_turn(case, peer, libraries[peer], work, arrays))
        for number in range(rounds):
            for turn in _in_order(turns, number):
                label = f"round {number + 1} of {rounds}, {turn.peer}, {case.name}"
                step(Begun(label, steps, case, turn.peer))
                turn.sample()
        record = record.with_rows([*_rows(turns, ceiling)])
        keep(record)
    return record


def works(case: Case, backward: bool, forward_mode: bool) -> tuple[Work, ...]:
    """Return the work of a case that is timed."""
    if not case.has_backward:
        return ("fwd",)
    return ("fwd", *(("fwd+bwd",) if backward else ()), *(("jvp",) if forward_mode else ()))


def _product(rounds: int) -> Product:
    size, dtype = (8192, "bfloat16") if _platform.current().name == "gpu" else (2048, "float32")
    # Numbers are not zeros or ones: what a GPU's power allows depends on the bits that change.
    factors = [jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0))]
    product = clocks.prepare(jnp.dot, *factors)
    return Product(size, dtype, statistics.median([ms for _ in range(rounds) for ms in product.sample()]))


def refused(case: Case, peer: Name, done: Sequence[Work], reason: str) -> list[Row]:
    """Return the rows of what was not done, for one reason."""
    return [*_rows([_Turn(case, peer, work, None, reason) for work in done], None)]


def _in_order(turns: Sequence[_Turn], number: int) -> Iterator[_Turn]:
    """Return the turns of a round: for each work the turns of all peers, of whom another is the first in each round."""
    groups: dict[Work, list[_Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.work, []).append(turn)
    for group in groups.values():
        first = number % len(group)
        yield from group[first:]
        yield from group[:first]


def _turn(case: Case, peer: Name, asked: Peer, work: Work, arrays: Data) -> _Turn:
    refusal = _attempt(lambda: asked.refuses(case, [*arrays.arguments, *options(case)]))
    if refusal is not None:
        return _Turn(case, peer, work, None, refusal)
    done = _attempt(lambda: asked.prepare(case, work, arrays))
    return _Turn(case, peer, work, asked.serving(case, arrays), done)


def _attempt[T](function: Callable[[], T]) -> T | str:
    """Return what a peer's function returns, or the first line of what it raises."""
    try:
        return function()
    except Exception as error:  # It is theirs to choose, and is recorded, as what they cannot do is a result too.
        sentence = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {sentence[:200]}"


def _rows(turns: Sequence[_Turn], ceiling: float | None) -> Iterator[Row]:
    """Return the rows measured, and the backward's, whose time is that of both passes less the forward's."""
    for _, group in itertools.groupby(turns, key=lambda turn: turn.peer):
        found: dict[Work, _Turn] = {turn.work: turn for turn in group}
        turn = found["fwd"]
        figures: dict[Work, Figures] = {"fwd": turn.figures()}
        if "fwd+bwd" in found:
            forward, both = figures["fwd"], found["fwd+bwd"].figures()
            difference = None if both.ms is None or forward.ms is None else both.ms - forward.ms
            figures |= {"bwd": Figures(ms=difference, refusal=both.refusal or forward.refusal), "fwd+bwd": both}
        if "jvp" in found:
            figures["jvp"] = found["jvp"].figures()
        for work, figure in figures.items():
            yield Row.of(turn.case, turn.peer, work, figure, ceiling, turn.implementation)
