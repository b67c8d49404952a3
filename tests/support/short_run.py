"""The part of a product of values that the short run of the tests, `make test`, takes; the rest is marked `slow`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = Mapping[str, Any]


def cover(strength: int) -> pytest.MarkDecorator:
    """Above a test: the short run takes so many of its rows that any `strength` values of different parameters that
    are together in some row are together in one of those."""
    return pytest.mark.cover(strength)


def sampled(step: int) -> pytest.MarkDecorator:
    """Above a test: the short run takes the first of every `step` rows. For rows that are dear and much alike."""
    return pytest.mark.sampled(step)


def covering(rows: Sequence[Row], strength: int) -> set[int]:
    """Indices of rows that cover all: each is the one with most that none before it had, the first of equals."""
    combinations = [set(itertools.combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set[Any]().union(*combinations)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(combinations[index] & missing))
        chosen.add(best)
        missing -= combinations[best]
    return chosen


def mark_slow(items: Iterable[Any], is_refused: Callable[[Any], bool]) -> None:
    """Mark what `cover` and `sampled` leave out.

    A backend that refuses every call on this machine covers nothing; one of its rows says so.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("cover") or item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for rows in tests.values():
        refused = [row for row in rows if any(map(is_refused, row.callspec.params.values()))]
        served = [row for row in rows if row not in refused and not row.get_closest_marker("slow")]
        kept = {*(_kept(served) if served else []), *refused[:1]}
        for row in rows:
            if row not in kept:
                row.add_marker(pytest.mark.slow)


def _kept(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of one test that the short run takes."""
    if sample := rows[0].get_closest_marker("sampled"):
        return list(rows[:: sample.args[0]])
    # A parameter's value is the same object in all rows that share it, and often not hashable.
    values = [{name: id(value) for name, value in row.callspec.params.items()} for row in rows]
    return [rows[index] for index in covering(values, *rows[0].get_closest_marker("cover").args)]
