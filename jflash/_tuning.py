"""The choice of a kernel's tiles among those it could take.

The tiles that were measured fastest on this device serve, or else the backend's first. Nothing needs to be tuned: every
backend lists its candidates beginning with the fastest where the list was made. `python -m jflash.bench --tune`
measures the others too; its findings are read here, once per process.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jflash import _platform, _settings


class TuningKey(NamedTuple):
    """The facts for which tiles are chosen."""

    kind: str
    """The backend and its kernel."""
    key: tuple[int | str, ...]
    """All facts that the answer may depend on, besides the device."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Answers to be tried, and the choices that are asked for meanwhile."""

    answers: Mapping[TuningKey, Any]
    platform: str
    """The platform that is measured. A call may also be traced for other platforms, whose keys are no part of the
    trial."""
    asked: dict[TuningKey, tuple[Any, ...]] = dataclasses.field(default_factory=dict[TuningKey, tuple[Any, ...]])
    """The candidates for each key, the backend's own choice first."""


_trial: contextvars.ContextVar[Trial | None] = contextvars.ContextVar("trial", default=None)


@contextlib.contextmanager
def trying(answers: Mapping[TuningKey, Any]) -> Generator[Trial]:
    """Let these answers, and no earlier findings, count inside the block, for calls that were not traced before."""
    trial = Trial(answers, _platform.current().name)
    token = _trial.set(trial)
    try:
        yield trial
    finally:
        _trial.reset(token)


def choose[Tiles](key: TuningKey, candidates: Sequence[Tiles]) -> Tiles:
    """Return one of the candidates, of which there is at least one: dataclasses of whole numbers and booleans."""
    trial = _trial.get()
    if trial is not None and trial.platform == _platform.current().name:
        trial.asked[key] = tuple(candidates)
        return trial.answers.get(key, candidates[0])
    found = _found(_platform.device_name()).get(key)
    return next((tiles for tiles in candidates if numbers(tiles) == found), candidates[0])


def numbers(tiles: Any) -> list[int]:
    """Return the numbers as which a choice is stored."""
    return list(dataclasses.astuple(tiles))


def path(device: str) -> Path | None:
    """Return where the device's answers are stored; `None` if platformdirs is not installed, and nothing can be."""
    folder = _settings.tiles_cache()
    return None if folder is None else folder / f"{re.sub('[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def is_tuned(device: str) -> bool:
    """Return whether something was stored for the device."""
    where = path(device)
    return where is not None and where.exists()


def store(device: str, answers: Mapping[TuningKey, Any], about: Mapping[str, Any]) -> Path:
    """Write the answers for a device, in place of earlier ones.

    Raises:
      ModuleNotFoundError: if platformdirs is not installed.
    """
    target = path(device)
    if target is None:
        raise ModuleNotFoundError("Tuned tiles are stored where platformdirs says, and it is not installed.")
    rows = [dict(kind=kind, key=key, tiles=numbers(tiles)) for (kind, key), tiles in answers.items()]
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another process that reads meanwhile finds the old file or the new one, whole.
    with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".json", delete=False) as file:
        json.dump(dict(device=device, **about, answers=rows), file, indent=1)
    os.replace(file.name, target)
    _found.cache_clear()
    return target


@functools.cache
def _found(device: str) -> dict[TuningKey, list[int]]:
    """Return the answers that were stored for a device.

    Raises:
      ValueError: if the file cannot be read.
    """
    source = path(device)
    if source is None or not source.exists():
        return {}
    try:
        rows = json.loads(source.read_text())["answers"]
        return {TuningKey(row["kind"], tuple(row["key"])): row["tiles"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source} is not as `python -m jflash.bench --tune` writes it: delete it.") from error
