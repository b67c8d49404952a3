"""Three warpgroups issue their products in turns: none waits for a turn that never comes, whatever its rows see."""

import dataclasses
from typing import Any

import cases
import hopper_kernels
import oracle
import pytest
from cases import Case
from interpreter import Interpreter
from jax import lax
from jax.experimental import io_callback
from kernel_families import HOPPER
from short_run import cover

from jflash import _tuning
from jflash._backends.mosaic_gpu import forward_schedule
from jflash._backends.mosaic_gpu.forward_schedule import Choice
from jflash._backends.mosaic_gpu.tiles import RowTiles

TILES = {64: RowTiles(3, 128, 2), 80: RowTiles(3, 112, 2), 96: RowTiles(3, 96, 2)}
"""By head dimension."""


@dataclasses.dataclass(frozen=True)
class Recorder(Interpreter):
    """Writes down what each warpgroup does with the turn; nothing waits for it here."""

    done: list[tuple[int, str, int]] = dataclasses.field(default_factory=list, compare=False)
    """Who, what, and whose turn it was or is to be, in the order of each warpgroup."""

    def take_turn(self, warpgroup: Any) -> None:
        self._record("take", warpgroup)

    def pass_turn(self, warpgroup: Any) -> None:
        self._record("pass", warpgroup)

    def _record(self, what: str, warpgroup: Any) -> None:
        write = lambda who, whose: self.done.append((int(who), what, int(whose)))
        io_callback(write, None, lax.axis_index("warpgroup"), warpgroup, ordered=True)


def left_after_all(done: list[tuple[int, str, int]]) -> list[int]:
    """How many turns each warpgroup was passed and did not take, once none can go on; fails if one still waits."""
    waiting = [[(what, whose) for who, what, whose in done if who == warpgroup] for warpgroup in range(3)]
    turns = [0, 0, 0]
    moved = True
    while moved:
        moved = False
        for warpgroup, steps in enumerate(waiting):
            while steps and (steps[0][0] == "pass" or turns[warpgroup] > 0):
                what, whose = steps.pop(0)
                assert what == "pass" or whose == warpgroup
                turns[whose] += 1 if what == "pass" else -1
                # The hardware would count a second arrival for the wait after the next.
                assert turns[whose] <= 1
                moved = True
    assert not any(waiting), waiting
    return turns


@pytest.mark.parametrize(
    ("dim", "query_length", "key_length", "options"),
    [
        (80, 300, 300, dict(causal=True)),
        *(
            pytest.param(*row, marks=cover(0))
            for row in [
                (64, 192, 640, {}),
                (64, 192, 640, dict(causal=True, offset="end")),
                (96, 330, 500, dict(window=(40, 10))),
                (64, 192, 400, dict(lengths="both")),
                (96, 300, 300, dict(segments="unsorted")),
                (80, 192, 100, {}),
            ]
        ),
    ],
    ids=str,
)
def test_every_turn_is_taken(
    monkeypatch: pytest.MonkeyPatch, dim: int, query_length: int, key_length: int, options: dict
):
    """One CTA takes all blocks of queries, one after the other: with one processor keys are not split."""
    every = lambda one: dict(items_per_cta=one.blocks * one.batch, pairs=one.batch)
    one_cta = lambda one, *_: Choice(dataclasses.replace(one, **every(one)), 0.0)
    monkeypatch.setattr(forward_schedule, "choose", one_cta)
    case = Case("bfloat16", query_length, key_length, heads=(1, 1), dims=(dim, dim), batch=(2,), **options)
    call = cases.of_forward(cases.build(case))
    done: list[tuple[int, str, int]] = []
    family = HOPPER._replace(interpreter=lambda parameters: Recorder(parameters, done=done))
    with _tuning.trying({_tuning.TuningKey("mosaic_gpu forward", (dim, dim, 0, "long")): TILES[dim]}):
        oracle.assert_right(hopper_kernels.run(call, 1, family=family), call)
    assert left_after_all(done) == [1, 0, 0]
