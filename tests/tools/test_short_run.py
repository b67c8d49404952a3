"""Tests of what the short run takes of a product, and that the planted defects still have their places."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from defect import ROOT, Defect
from defects import DEFECTS
from short_run import cover, covering, mark_slow

AXES = {"dtype": "abc", "heads": "de", "mask": "fghi"}
ROWS = [dict(zip(AXES, row, strict=True)) for row in itertools.product(*AXES.values())]


@pytest.mark.parametrize(("strength", "fewest"), [(1, 4), (2, 12), (3, 24)])
def test_every_combination_is_in_some_row(strength: int, fewest: int) -> None:
    chosen = [ROWS[index] for index in covering(ROWS, strength)]
    met = {pair for row in chosen for pair in itertools.combinations(row.items(), strength)}
    assert met == {pair for row in ROWS for pair in itertools.combinations(row.items(), strength)}
    assert fewest <= len(chosen) <= 1.25 * fewest


def test_rows_that_do_not_exist_are_not_asked_for() -> None:
    rows = [dict(heads=1, mask=None), dict(heads=2, mask="full")]
    assert covering(rows, 2) == {0, 1}


class Item:
    """A row of a test, with the part of pytest's interface that is asked."""

    def __init__(self, number: int, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = f"test.py::test[{number}]"
        self.callspec = SimpleNamespace(params=dict(number=number, parity=(False, True)[number % 2]))
        self.marks = [decorator.mark for decorator in marks]

    def iter_markers(self, name: str) -> Any:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


@pytest.mark.parametrize(
    ("mark", "taken"), [(cover(0), []), (cover(every=2), [1, 3]), (cover(1), [1, 2, 3, 5]), (cover(1, every=3), [1, 5])]
)
def test_rows_that_are_taken(mark: pytest.MarkDecorator, taken: list[int]) -> None:
    """A row that has 0 itself, as the first and the fifth have here, is not counted."""
    rows = [Item(number, mark, *[cover(0)] * (number in (0, 4))) for number in range(6)]
    mark_slow(rows, lambda value: False)
    assert [row.callspec.params["number"] for row in rows if row.get_closest_marker("slow") is None] == taken


@pytest.mark.parametrize(("one_of", "left"), [(1, 0), (2, 2), (3, 3), (100, 4)])
def test_rows_that_only_the_deep_run_takes(one_of: int, left: int) -> None:
    """The short run takes one of six rows; those with a mark of their own are sampled by the mark of the test."""
    marks = cover(0, rest=one_of), cover(every=100)
    rows = [Item(0, cover(every=100)), *(Item(number, *marks) for number in range(1, 6))]
    mark_slow(rows, lambda value: False)
    deep = [row for row in rows if row.get_closest_marker("deep")]
    assert len(deep) == left
    assert all(row.get_closest_marker("slow") for row in deep)


def test_nothing_but_cover_decides() -> None:
    folders = ROOT / "tests"
    for name in ("slow", "deep"):
        marked = [path.name for path in folders.rglob("*.py") if f"pytest.mark.{name}" in path.read_text()]
        assert marked == ["short_run.py"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_planted_defect_has_one_place(defect: Defect) -> None:
    assert len(defect.places()) == 1
    assert defect.wrong != defect.right
