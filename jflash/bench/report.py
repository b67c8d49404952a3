"""The table of a record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import rich.box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from jflash.bench.record import Record, Row

FLOPS = (
    "FLOPs: 2 (H + D) for each pair of a query and a key that it sees, backward 2.5 times that, jvp 4 times; causal "
    "alone counts half of all pairs."
)
WIDEST = 160
"""The most characters of a table's line: captions are sentences, and wrap."""
BACKWARD = "Backward: the time of forward and backward in one call, less the forward's."


def table(record: Record) -> Table:
    """Return a table with a line for each case and peer."""
    table = Table(
        caption="\n".join(caption(record)),
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption_justify="left",
    )
    table.add_column("")
    unit = rate_unit(record.rows)
    for work in ("forward", "backward", *(["jvp"] if has_jvp(record.rows) else [])):
        for name in (f"{work}\nms", unit, "of\nproduct"):
            table.add_column(name, justify="right")
    for name in ("both\nms", "temporary\nMiB", "peak\nMiB", "compile\ns"):
        table.add_column(name, justify="right")
    for case, rows in itertools.groupby(record.rows, key=case_name):
        table.add_row(case)
        for peer, works in itertools.groupby(rows, key=lambda row: row.peer):
            table.add_row(f"  {peer}", *_figures(record, {row.work: row for row in works}))
    return table


def has_jvp(rows: Sequence[Row]) -> bool:
    """Return whether forward mode was measured."""
    return any(row.work == "jvp" for row in rows)


def show(console: Console, table: Table) -> None:
    """Print all of a table, beyond the right edge of a narrow terminal or of a file's 80 columns if it must be."""
    wide = console.options.update_width(WIDEST)
    console.width = max(console.width, min(WIDEST, Measurement.get(console, wide, table).maximum))
    console.print(table)


def caption(record: Record) -> Iterator[str]:
    """Return what a reader of the figures needs: the machine, the clock, the missing peers, the refusals."""
    yield str(record.about)
    if record.product is not None:
        product = record.product
        rate = f"{scaled(record.rows, product.tflops)} {rate_unit(record.rows)}"
        yield f"The machine's own matrix product, {product.size:,} square, {product.dtype}: {rate}."
    yield f"{FLOPS} {BACKWARD}"
    yield "Memory and compilation: forward / forward and backward."
    for name, reason in record.about.missing.items():
        yield f"{name} is missing: {reason}"
    refused: dict[str, list[Row]] = {}
    for row in record.rows:
        if row.figures.refusal is not None:
            refused.setdefault(f"{row.peer} refuses {{}}: {row.figures.refusal}", []).append(row)
    for sentence, rows in refused.items():
        yield sentence.replace("{}", "; ".join(dict.fromkeys(case_name(row) for row in rows)), 1)
    yield from notes(record.rows)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Return what the record says of some rows only, with the names of the peers."""
    whose: dict[str, list[str]] = {}
    for row in rows:
        if row.note is not None:
            whose.setdefault(row.note, []).append(row.peer)
    for note, peers in whose.items():
        yield f"{', '.join(dict.fromkeys(peers))}: {note}."


def case_name(row: Row) -> str:
    """Return the case's mask or option, and its shape."""
    return f"{row.case}: {shape(row)}"


def shape(row: Row) -> str:
    """Return the case's batch, tokens, heads and their dimension as text."""
    tokens = f"{row.queries:,}" if row.queries == row.keys else f"{row.queries:,} on {row.keys:,}"
    heads = f"{row.heads}" if row.heads == row.key_heads else f"{row.heads} on {row.key_heads}"
    return f"{row.batch} x {tokens}, {heads} x d{head_dims(row)}"


def head_dims(row: Row) -> str:
    """Return the head dimensions as the command line takes them."""
    return f"{row.head_dim}" if row.head_dim == row.value_dim else f"{row.head_dim}/{row.value_dim}"


def rate_unit(rows: Sequence[Row]) -> str:
    """Return the unit in which these rates are neither tiny nor huge."""
    return "TFLOP/s" if max((row.tflops or 0 for row in rows), default=0) >= 1 else "GFLOP/s"


def scaled(rows: Sequence[Row], tflops: float | None) -> str:
    """Return a rate in `rate_unit`."""
    if tflops is None:
        return ""
    return f"{tflops:,.0f}" if rate_unit(rows) == "TFLOP/s" else f"{1e3 * tflops:,.0f}"


def _figures(record: Record, works: dict[str, Row]) -> Iterator[str]:
    for work in ("fwd", "bwd", *(["jvp"] if has_jvp(record.rows) else [])):
        row = works.get(work)
        if row is None or row.figures.ms is None:
            yield from ("refused" if row is not None and row.figures.refusal is not None else "", "", "")
            continue
        yield short(row.figures.ms)
        yield scaled(record.rows, row.tflops)
        yield "" if row.fraction is None else f"{row.fraction:.2f}"
    both = works.get("fwd+bwd")
    yield "" if both is None else short(both.figures.ms)
    pair = [None if work not in works else works[work].figures for work in ("fwd", "fwd+bwd")]
    for name in ("temporary_mib", "peak_mib", "compile_s"):
        known = [short(None if figures is None else getattr(figures, name)) for figures in pair]
        yield " / ".join(text for text in known if text)


def short(number: float | None) -> str:
    """Return a number with three digits, or all before the point."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
