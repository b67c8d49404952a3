"""Every case by every peer, in turns: each round measures each once, so that a machine's moods are shared fairly.

What a GPU has just done says how fast it is: a clock that was lowered for want of power stays low for some tens of
milliseconds. So the peers do the same work one after the other, and in each round another one is the first.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jflash import _platform, _tuning
from jflash.bench import clocks
from jflash.bench.cases import Case, Data, Work, data, options
from jflash.bench.peers import PEERS, Name, Peer, versions
from jflash.bench.record import About, Figures, Product, Record, Row

Step = Callable[[str, int], None]
"""Is told what comes next, and how many steps there are in all."""


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
) -> Record:
    """All figures. Peers that are not here are listed with the reason."""
    here = _platform.current()
    reasons: dict[Name, str | None] = {name: libraries[name].missing(here) for name in peers}
    present: list[Name] = [name for name, reason in reasons.items() if reason is None]
    works: tuple[Work, ...] = ("fwd", *(["fwd+bwd"] if backward else []), *(["jvp"] if forward_mode else []))
    steps = (1 + rounds) * len(present) * sum(len(works) if case.has_backward else 1 for case in cases)

    size, dtype = (8192, "bfloat16") if here.name == "gpu" else (2048, "float32")
    # Not of zeros or ones: what a GPU's power allows depends on the bits that change.
    factors = [jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0))]
    product, product_ms = clocks.prepare(jnp.dot, *factors), list[float]()
    turns: list[_Turn] = []
    for case in cases:
        arrays = data(case)
        for peer in present:
            for work in works if case.has_backward else works[:1]:
                step(f"compile {peer}, {case.name}", steps)
                turns.append(_turn(case, peer, libraries[peer], work, arrays))
    for number in range(rounds):
        product_ms += product.sample()
        for turn in _in_order(turns, number):
            step(f"round {number + 1} of {rounds}, {turn.peer}, {turn.case.name}", steps)
            turn.sample()
    rate = Product(size, dtype, statistics.median(product_ms))
    device = _platform.device_name()
    about = About(
        date=str(datetime.date.today()),
        device=device,
        clock=f"{clocks.clock_name()}, median of {rounds} round{'s' * (rounds > 1)}",
        versions=versions(present) | ({"tiles": "tuned"} if _tuning.is_tuned(device) else {}),
        missing={name: reason for name, reason in reasons.items() if reason is not None},
    )
    return Record(about, rate, tuple(_rows(turns, rate.tflops)))


def _in_order(turns: Sequence[_Turn], number: int) -> Iterator[_Turn]:
    """The turns of a round: of each work of a case those of all peers, of whom another is the first in each."""
    groups: dict[tuple[Case, Work], list[_Turn]] = {}
    for turn in turns:
        groups.setdefault((turn.case, turn.work), []).append(turn)
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
    """What a peer's function returns, or the first line of what it raises."""
    try:
        return function()
    except Exception as error:  # It is theirs to choose, and is recorded, as what they cannot do is a result too.
        sentence = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {sentence[:200]}"


def _rows(turns: Sequence[_Turn], ceiling: float) -> Iterator[Row]:
    """Those measured, and the backward's, whose time is that of both less the forward's."""
    for _, group in itertools.groupby(turns, key=lambda turn: (turn.case, turn.peer)):
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
