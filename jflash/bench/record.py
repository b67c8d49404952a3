"""What a run found: one schema, in memory and as JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jflash.bench.cases import Case, Work, flops


@dataclasses.dataclass(frozen=True)
class About:
    """Where and how it was measured."""

    date: str
    device: str
    clock: str
    """What was read: wall clock, or the times of kernels."""
    versions: dict[str, str]
    """Of jflash, JAX and the peers' packages; and that jflash's tiles were tuned, if they were."""
    missing: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Peers that took no part, and why."""

    def __str__(self) -> str:
        """As it stands under tables and pictures."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {self.device}, {self.clock}; {versions}."


@dataclasses.dataclass(frozen=True)
class Figures:
    """What can be known of some work. What was not measured, or cannot be on this machine, is `None`."""

    ms: float | None = None
    """Median time, in milliseconds."""
    samples_ms: list[float] | None = None
    """What it is the median of."""
    compile_s: float | None = None
    """Seconds of tracing, lowering and compiling. The first of a peer has its imports in it."""
    temporary_mib: float | None = None
    """What the work holds besides arguments and results, in MiB."""
    peak_mib: float | None = None
    """Arguments, results and what is temporary together."""
    device_peak_mib: float | None = None
    """The device's own high-water mark, everything else that was on it included; known where this work raised it."""
    refusal: str | None = None
    """Why it was not done, in the words of the peer that refused."""


SHAPE = ("dtype", "batch", "queries", "keys", "heads", "key_heads", "head_dim", "value_dim")


@dataclasses.dataclass(frozen=True)
class Row:
    """One case, by one peer: forward, backward, both in one call, or forward mode."""

    peer: str
    case: str
    is_feature: bool
    work: Work
    dtype: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    figures: Figures
    asked_width: int | None = None
    """Heads times head dimension as they were asked for, if that is no multiple of the head dimension."""
    tflops: float | None = None
    """10**12 floating-point operations a second, by `cases.flops`."""
    fraction: float | None = None
    """That, as a part of the machine's own rate at matrix products."""
    implementation: str | None = None
    """Which of the peer's implementations served."""
    note: str | None = None
    """What else must be known to compare it with others."""

    @property
    def width(self) -> int:
        """Heads times head dimension, as it was asked for."""
        return self.heads * self.head_dim if self.asked_width is None else self.asked_width

    @property
    def call(self) -> tuple[Any, ...]:
        """What tells its case from others."""
        return (self.case, self.is_feature, self.asked_width, *(getattr(self, name) for name in SHAPE))

    @staticmethod
    def of(
        case: Case,
        peer: str,
        work: Work,
        figures: Figures,
        ceiling: float | None = None,
        implementation: str | None = None,
    ) -> Row:
        """The row with its rates; `ceiling` is the machine's TFLOP/s at matrix products."""
        shape = {
            field.name: getattr(case, field.name) for field in dataclasses.fields(Row) if hasattr(case, field.name)
        }
        # The difference of two noisy times can be nothing.
        tflops = flops(case, work) / figures.ms / 1e9 if figures.ms is not None and figures.ms > 0 else None
        fraction = None if tflops is None or ceiling is None else tflops / ceiling
        return Row(
            peer=peer,
            case=case.name,
            work=work,
            figures=figures,
            tflops=tflops,
            fraction=fraction,
            implementation=implementation,
            **shape,
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """A square matrix product: the machine's own rate."""

    size: int
    dtype: str
    ms: float

    @property
    def tflops(self) -> float:
        """10**12 floating-point operations a second."""
        return 2 * self.size**3 / self.ms / 1e9


@dataclasses.dataclass(frozen=True)
class Record:
    """A run."""

    about: About
    product: Product | None
    rows: tuple[Row, ...]

    def has(self, case: Case, peer: str, works: Sequence[Work]) -> bool:
        """Whether all of this was measured, or refused."""
        call = Row.of(case, peer, "fwd", Figures()).call
        return set(works) <= {row.work for row in self.rows if (row.call, row.peer) == (call, peer)}

    def with_rows(self, rows: Sequence[Row]) -> Record:
        """With these, in the place of those of the same case and peer; each case's rows one after the other."""
        new = {(row.call, row.peer) for row in rows}
        kept = [row for row in self.rows if (row.call, row.peer) not in new]
        calls = {call: place for place, call in enumerate(dict.fromkeys(row.call for row in (*self.rows, *rows)))}
        return dataclasses.replace(self, rows=tuple(sorted((*kept, *rows), key=lambda row: calls[row.call])))

    def continued(self, about: About, present: Sequence[str]) -> Record:
        """What a later run, by the peers that are present, goes on with.

        Raises:
          ValueError: if the later run has another device, clock or version, so that figures would not compare.
        """
        before = {"device": self.about.device, "clock": self.about.clock, **self.about.versions}
        now = {"device": about.device, "clock": about.clock, **about.versions}
        if changes := [
            f"{name} {new}, was {before[name]}" for name, new in now.items() if before.get(name, new) != new
        ]:
            raise ValueError(
                f"The record cannot be gone on with, as figures would not compare. Got {'; '.join(changes)}."
            )
        measured = {*present, *(row.peer for row in self.rows)}
        missing = {name: why for name, why in (self.about.missing | about.missing).items() if name not in measured}
        versions = self.about.versions | about.versions
        return dataclasses.replace(self, about=dataclasses.replace(self.about, versions=versions, missing=missing))

    def write(self, path: pathlib.Path) -> None:
        """As JSON, one row on a line; what is not known is left out. Whenever it is ended, a whole file is there."""
        lines = [_line(_flat(row)) for row in self.rows]
        product = None
        if self.product is not None:
            product = _known(dataclasses.asdict(self.product))
            # Of what is written: read and written again, it must be the same.
            product["tflops"] = float(f"{Product(**product).tflops:.9g}")
        text = "".join(
            (
                f'{{"about": {_line(_known(dataclasses.asdict(self.about)))},\n',
                f'"product": {_line(product)},\n',
                '"rows": [\n',
                ",\n".join(lines),
                "\n]}\n",
            )
        )
        whole = path.with_name(f"{path.name}.partial")
        whole.write_text(text)
        whole.replace(path)


def read(path: pathlib.Path) -> Record:
    """The record that `Record.write` wrote."""
    found = json.loads(path.read_text())
    product = found["product"]
    names = {field.name for field in dataclasses.fields(Figures)}
    rows: list[Row] = []
    for row in found["rows"]:
        figures: dict[str, Any] = {name: row.pop(name) for name in names & row.keys()}
        rows.append(Row(figures=Figures(**figures), **row))
    return Record(
        about=About(**found["about"]),
        product=None if product is None else Product(product["size"], product["dtype"], product["ms"]),
        rows=tuple(rows),
    )


def _flat(row: Row) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    return _known(fields | fields.pop("figures"))


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    # Nine digits: what is behind them is noise of binary fractions.
    short = {name: float(f"{value:.9g}") for name, value in fields.items() if isinstance(value, float)}
    return {name: short.get(name, value) for name, value in fields.items() if value is not None}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
