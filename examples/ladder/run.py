"""The ladder: the same attention in steps from a naive Metal shader to SIMD-group matrices, and what each step bought.

    python examples/ladder/run.py [--length 256] [--head-dim 64]

Every shader is one file that can be read alone: one head, float32, no options, lengths that are multiples of 32. Each is run
and held against attention in float64. Where there is no Apple GPU the emulator runs them and counts what they do: bytes
read and written in device memory, bytes in threadgroup memory, 8x8x8 matrix products, exponentials, barriers. Counts are no
times: the emulator knows nothing of caches, registers or what the GPU does at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jflash_metal import _ffi

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Step:
    """One shader of the ladder."""

    title: str
    file: str
    tile: int = 32
    threads: int = 32


FORWARD = [
    Step("V0 naive", "v0_naive.metal"),
    Step("V1 tiles, online softmax", "v1_tiled.metal"),
    Step("V2 float4, SIMD reductions", "v2_simd.metal", threads=128),
    Step("V3 matrices, 32x32 tiles", "v3_matrices.metal", threads=128),
    Step("V4 matrices, 16x16 tiles", "v3_matrices.metal", tile=16, threads=64),
]


def main(length: int = 256, head_dim: int = 64) -> None:
    """Run every step and print the table.

    Args:
      length: of the sequence; a multiple of 32.
      head_dim: a multiple of 32, up to 64 for the backward with atomics and up to 128 for the others.
    """
    reason = _ffi.available()
    if reason is not None:
        raise SystemExit(reason)
    table = Table(title=f"one head, {length} tokens, head dimension {head_dim}, float32, run by the {_ffi.host()}")
    table.add_column("step")
    for name in ("device read", "device written", "threadgroup", "8x8x8 products", "exponentials", "barriers", "error"):
        table.add_column(name, justify="right")
    for row in rows(length, head_dim):
        table.add_row(*row)
    Console(width=140).print(table)


def rows(length: int, head_dim: int) -> list[tuple[str, ...]]:
    """A line of the table for each step; bytes in KiB."""
    problem = Problem.draw(length, head_dim)
    lines = [line(step.title, *problem.forward(step)) for step in FORWARD]
    lines.append(line("backward, atomic adds", *problem.backward_atomic()))
    lines.append(line("backward, owned", *problem.backward_owned()))
    return lines


def line(title: str, error: float, counts: list[_ffi.Counters]) -> tuple[str, ...]:
    """A step's counts, those of its kernels added up, and its largest error."""
    total = lambda name: sum(getattr(one, name) for one in counts)
    kib = lambda name: f"{total(name) / 1024:,.0f} KiB"
    plain = lambda name: f"{total(name):,}"
    return (
        title,
        kib("device_read"),
        kib("device_written"),
        kib("threadgroup"),
        plain("matrix_products"),
        plain("exponentials"),
        plain("barriers"),
        f"{error:.1e}",
    )
