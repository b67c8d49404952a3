"""The pictures of a record: bars by sequence length, and the time of every option."""

from __future__ import annotations

import itertools
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from jflash.bench.record import Record, Row
from jflash.bench.report import head_dims, notes, rate_unit, shape

COLOURS = {
    "jflash": "#d9480f",
    "jax.nn": "#868e96",
    "cuDNN": "#2b8a3e",
    "tokamax": "#1971c2",
    "fa4-jax": "#212529",
    "torch": "#6741d9",
    "flex_attention": "#c2255c",
    "FlashAttention-4": "#e8a200",
    "jvp_flash_attention": "#0b7285",
}
TITLES = {"fwd": "forward", "bwd": "backward"}
BARS = 0.8
"""The part of the place of a length, or of an option, that its bars take."""
CHARACTERS_PER_INCH = 17
"""The most characters per inch of the caption."""


def draw(record: Record, folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Write every picture that the record has figures for, and return their paths."""
    figures: dict[str, Figure] = {}
    grid = [row for row in record.rows if not row.is_feature and row.tflops is not None and row.work in TITLES]
    widths = sorted({row.width for row in grid})
    for work, width in itertools.product(TITLES, widths):
        rows = [row for row in record.rows if not row.is_feature and (row.work, row.width) == (work, width)]
        if rows:
            name = TITLES[work] if len(widths) == 1 else f"{TITLES[work]}-{width}"
            figures[name] = by_length(record, rows, f"Attention {TITLES[work]}, width {width:,}, {rows[0].dtype}")
    options = [row for row in record.rows if row.is_feature and row.work in TITLES]
    if options:
        figures["options"] = by_option(record, options)
    paths = {name: folder / f"{stem}-{name}.png" for name in figures}
    for name, figure in figures.items():
        # Without matplotlib's version in the file, the same figures make the same file.
        figure.savefig(paths[name], dpi=100, metadata={"Software": None})
    return list(paths.values())


def by_length(record: Record, rows: Sequence[Row], title: str) -> Figure:
    """Draw a panel for each head dimension and mask; in it, for each sequence length, a bar for each peer."""
    masks, peers = (_distinct(rows, name) for name in ("case", "peer"))
    dims = list(dict.fromkeys(map(head_dims, rows)))
    lengths = sorted(_distinct(rows, "queries"))
    thousand = 1 if rate_unit(rows) == "TFLOP/s" else 1e3
    panel = max(4.0, 0.8 + 0.36 * len(lengths) * len(peers))
    figure = Figure((panel * len(masks), 2.4 * len(dims) + 1.2), layout="constrained")
    panels: Any = figure.subplots(len(dims), len(masks), squeeze=False, sharey=True)
    for (line, dim), (column, mask) in itertools.product(enumerate(dims), enumerate(masks)):
        axes = panels[line, column]
        for number, peer in enumerate(peers):
            found = {row.queries: row for row in rows if (head_dims(row), row.case, row.peer) == (dim, mask, peer)}
            heights = [thousand * (found[n].tflops or 0) if n in found else 0 for n in lengths]
            labels = [_label(found.get(n), f"{height:.0f}") for n, height in zip(lengths, heights, strict=True)]
            bars = axes.bar(
                _places(len(lengths), number, len(peers)), heights, BARS / len(peers), label=peer, color=COLOURS[peer]
            )
            axes.bar_label(bars, labels, fontsize=7, padding=1)
        axes.set_title(f"head dimension {dim}, {mask}", fontsize=9)
        axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axes.margins(y=0.12)
    for axes in panels[:, 0]:
        axes.set_ylabel(rate_unit(rows))
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    return _finished(record, rows, figure, panels[0, 0], title)


def by_option(record: Record, rows: Sequence[Row]) -> Figure:
    """Draw for each option a bar for each peer, as long as it took; forward beside backward."""
    cases, peers, works = (_distinct(rows, name) for name in ("case", "peer", "work"))
    figure = Figure((4.6 * len(works) + 1, 0.15 * len(cases) * len(peers) + 1.8), layout="constrained")
    panels: Any = figure.subplots(1, len(works), squeeze=False, sharey=True)
    for axes, work in zip(panels[0], works, strict=True):
        for number, peer in enumerate(peers):
            found = {row.case: row for row in rows if (row.peer, row.work) == (peer, work)}
            times = [found[case].figures.ms or 0 if case in found else 0 for case in cases]
            labels = [_label(found.get(case), f"{time:.3g}") for case, time in zip(cases, times, strict=True)]
            bars = axes.barh(
                _places(len(cases), number, len(peers)), times, BARS / len(peers), label=peer, color=COLOURS[peer]
            )
            axes.bar_label(bars, labels, fontsize=6, padding=1)
        axes.set_title(TITLES[work], fontsize=9)
        axes.set_xlabel("ms")
        axes.margins(x=0.12)
    panels[0, 0].set_yticks(range(len(cases)), cases, fontsize=8)
    panels[0, 0].set_ylim(len(cases) - 0.5, -0.5)
    return _finished(record, rows, figure, panels[0, 0], f"What options take: {shape(rows[0])}, {rows[0].dtype}")


def _places(groups: int, number: int, bars: int) -> list[float]:
    """Return the middles of the bars of this number, one in each group."""
    return [group + (number - (bars - 1) / 2) * BARS / bars for group in range(groups)]


def _label(row: Row | None, figure: str) -> str:
    if row is not None and row.figures.refusal is not None:
        return "refused"
    return "" if row is None or row.figures.ms is None else figure


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(row, name) for row in rows))


def _finished(record: Record, rows: Sequence[Row], figure: Figure, axes: Any, title: str) -> Figure:
    """Add a title, a legend, and under it all where it was measured."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    missing = [f"Missing: {', '.join(record.about.missing)}."] if record.about.missing else []
    characters = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    caption = [textwrap.fill(line, characters) for line in (str(record.about), *missing, *notes(rows))]
    figure.supxlabel("\n".join(caption), fontsize=7, color="#495057")
    return figure
