"""The part of the tests that each run takes: conftest marks `slow` what `make test` leaves out.

Of that it marks `deep` what `make test-rest` leaves out too; `make test-all` takes everything.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = Mapping[str, Any]


def cover(strength: int | None = None, *, every: int = 1, rest: int = 1) -> pytest.MarkDecorator:
    """Say which rows of a test the short run takes; without this mark it takes all.

    It takes so many of the first of every `every` rows that any `strength` values of different parameters that are
    together in some of them are together in one that is taken. Without a strength it takes all of those, and with 0
    none: then the mark may also stand at a single row.

    Of the rows that the short run leaves, `make test-rest` takes one of every `rest`: for rows that go through one
    mechanism, with values that other tests take together.
    """
    return pytest.mark.cover(strength, every, rest)


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
    """Mark what the short run leaves out.

    A backend that refuses every call on this machine covers nothing; one of its rows says so.
    """
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("cover"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for rows in tests.values():
        wanted = [row for row in rows if all(mark.args[0] != 0 for mark in row.iter_markers("cover"))]
        refused = {row for row in rows if any(map(is_refused, _parameters(row).values()))}
        served = [row for row in wanted if row not in refused]
        kept = {*(_kept(served) if served else []), *[row for row in wanted if row in refused][:1]}
        left = [row for row in rows if row not in kept]
        for row in left:
            row.add_marker(pytest.mark.slow)
        for row in _sampled_out([row for row in left if row not in refused]):
            row.add_marker(pytest.mark.deep)


def _parameters(row: Any) -> Row:
    return row.callspec.params if hasattr(row, "callspec") else {}


def _kept(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of one test that the short run takes, of those that it may take."""
    mark = rows[0].get_closest_marker("cover")
    if mark is None:
        return list(rows)
    strength, every, _ = mark.args
    rows = rows[::every]
    if strength is None:
        return list(rows)
    # A parameter's value is the same object in all rows that share it, and often not hashable.
    values = [{name: id(value) for name, value in _parameters(row).items()} for row in rows]
    return [rows[index] for index in covering(values, strength)]


def _sampled_out(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of one test that `make test-rest` leaves.

    A checksum orders them, so that no value of a parameter is always left because of its place.
    """
    one_of = max((mark.args[2] for row in rows for mark in row.iter_markers("cover")), default=1)
    ordered = sorted(rows, key=lambda row: zlib.crc32(row.nodeid.encode()))
    return ordered[-(-len(rows) // one_of) :]
