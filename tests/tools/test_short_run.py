"""Tests of what the short run takes of a product, and that the planted defects still have their places."""

import itertools

import planted_defects
import pytest
from planted_defects import Defect
from short_run import covering

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


@pytest.mark.parametrize("defect", planted_defects.DEFECTS, ids=lambda defect: defect.name)
def test_planted_defect_has_one_place(defect: Defect) -> None:
    assert len(defect.places()) == 1
    assert defect.wrong != defect.right
