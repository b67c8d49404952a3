"""The record of a run: one schema, in memory and as JSON."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jflash.bench.cases import Case, Work, flops


@dataclasses.dataclass(frozen=True)
class About:
    """The place and manner of a measurement."""

    date: str
    device: str
    clock: str
    """The clock: wall clock, or the times of kernels."""
    versions: dict[str, str]
    """The versions of jflash, JAX and the peers' packages; and that jflash's tiles were tuned, if they were."""
    missing: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The peers that took no part, with reasons."""

    def __str__(self) -> str:
        """Return the text that stands under tables and pictures."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}, {self.device}, {self.clock}; {versions}."


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of some work. What was not measured, or cannot be on this machine, is `None`."""

    ms: float | None = None
    """The median time, in milliseconds."""
    samples_ms: list[float] | None = None
    """The samples of which `ms` is the median."""
    compile_s: float | None = None
    """The seconds of tracing, lowering and compiling. A peer's first work includes its imports."""
    temporary_mib: float | None = None
    """The memory of the work besides arguments and results, in MiB."""
    peak_mib: float | None = None
    """The memory of arguments, results and what is temporary together, in MiB."""
    device_peak_mib: float | None = None
    """The device's own high-water mark, including everything else that was on it; known where this work raised it."""
    refusal: str | None = None
    """The reason why it was not done, in the words of the peer that refused."""


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
    """The rate in 10**12 floating-point operations a second, by `cases.flops`."""
    fraction: float | None = None
    """The rate as a part of the machine's own rate at matrix products."""
    implementation: str | None = None
    """The peer's implementation that served."""
    note: str | None = None
    """A remark that must be known to compare the row with others."""

    @property
    def width(self) -> int:
        """The number of heads times the head dimension, as it was asked for."""
        return self.heads * self.head_dim if self.asked_width is None else self.asked_width

    @property
    def call(self) -> tuple[Any, ...]:
        """The facts that tell the row's case from others."""
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
        """Return the row with its rates; `ceiling` is the machine's TFLOP/s at matrix products."""
        shape = {
            field.name: getattr(case, field.name) for field in dataclasses.fields(Row) if hasattr(case, field.name)
        }
        # The difference of two noisy times can be 0 or less.
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
    """A square matrix product, which shows the machine's own rate."""

    size: int
    dtype: str
    ms: float

    @property
    def tflops(self) -> float:
        """The rate in 10**12 floating-point operations a second."""
        return 2 * self.size**3 / self.ms / 1e9


@dataclasses.dataclass(frozen=True)
class Record:
    """A run."""

    about: About
    product: Product | None
    rows: tuple[Row, ...]

    def has(self, case: Case, peer: str, works: Sequence[Work]) -> bool:
        """Return whether all of this was measured, or refused."""
        call = Row.of(case, peer, "fwd", Figures()).call
        return set(works) <= {row.work for row in self.rows if (row.call, row.peer) == (call, peer)}

    def with_rows(self, rows: Sequence[Row]) -> Record:
        """Return the record with these rows, in the place of those of the same case and peer. Rows of a case stay
        together."""
        new = {(row.call, row.peer) for row in rows}
        kept = [row for row in self.rows if (row.call, row.peer) not in new]
        calls = {call: place for place, call in enumerate(dict.fromkeys(row.call for row in (*self.rows, *rows)))}
        return dataclasses.replace(self, rows=tuple(sorted((*kept, *rows), key=lambda row: calls[row.call])))

    def continued(self, about: About, present: Sequence[str]) -> Record:
        """Return the record with which a later run, by the peers that are present, goes on.

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
        """Write JSON, one row on a line, without what is not known. Whenever the process is ended, a whole file is
        there."""
        lines = [_line(_flat(row)) for row in self.rows]
        product = None
        if self.product is not None:
            product = _known(dataclasses.asdict(self.product))
            # The rate is that of the numbers as written, so that a record stays the same when read and written again.
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
    """Return the record that `Record.write` wrote."""
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
    # Beyond nine digits there is only noise of binary fractions.
    short = {name: float(f"{value:.9g}") for name, value in fields.items() if isinstance(value, float)}
    return {name: short.get(name, value) for name, value in fields.items() if value is not None}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
