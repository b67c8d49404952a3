"""The ladder: the same attention in steps from a naive Metal shader to SIMD-group matrices, and what each step bought.

    python examples/ladder/run.py [--length 256] [--head-dim 64]

Every shader is one file that can be read alone: one head, float32, no options, lengths that are multiples of 32. Each
is run and held against attention in float64. Where there is no Apple GPU the emulator runs them and counts what they
do: bytes read and written in device memory, bytes in threadgroup memory, 8x8x8 matrix products, exponentials, barriers.
Counts are no times: the emulator knows nothing of caches, registers or what a GPU does at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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
    head_dim: int = 128
    """The largest head dimension for which the step's tiles fit into threadgroup memory."""


FORWARD = [
    Step("V0 naive", "v0_naive.metal"),
    Step("V1 tiles, online softmax", "v1_tiled.metal"),
    Step("V2 float4, SIMD reductions", "v2_simd.metal", threads=128),
    Step("V3 matrices, 32x32 tiles", "v3_matrices.metal", threads=128, head_dim=96),
    Step("V4 matrices, 16x16 tiles", "v3_matrices.metal", tile=16, threads=64),
]


BACKWARD = ("query", "key", "value", "d_out", "lse", "delta")
COLUMNS = (
    "device read, KiB",
    "written, KiB",
    "threadgroup, KiB",
    "8x8x8 products",
    "exponentials",
    "barriers",
    "atomics",
    "error",
)
Run = tuple[list[np.ndarray], list[_ffi.Counters]]


def main(length: int = 256, head_dim: int = 64) -> None:
    """Run every step and print the table.

    Args:
      length: of the sequence; a multiple of 32.
      head_dim: a multiple of 32 up to 128; V3 has threadgroup memory up to 96, the backward with atomics up to 64.
    """
    reason = _ffi.available()
    if reason is not None:
        raise SystemExit(reason)
    table = Table(title=f"one head, {length} tokens, head dimension {head_dim}, float32, run by the {_ffi.host()}")
    table.add_column("step", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows(length, head_dim):
        table.add_row(*row)
    Console(width=160).print(table)


def rows(length: int, head_dim: int) -> list[tuple[str, ...]]:
    """A line of the table for each step; bytes in KiB."""
    problem = Problem.draw(length, head_dim)
    lines = [line(step.title, *problem.forward(step)) for step in FORWARD if head_dim <= step.head_dim]
    if head_dim <= 64:
        lines.append(line("backward, atomic adds", *problem.backward_atomic()))
    lines.append(line("backward, owned", *problem.backward_owned()))
    return lines


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arrays `[length, head_dim]` of one head, and what should come of them, in float64."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_out: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    out: np.ndarray
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray]

    @staticmethod
    def draw(length: int, head_dim: int) -> Problem:
        """Random numbers, the same on every run; the logits' scale is head_dim**-0.5."""
        numbers = np.random.default_rng(0)
        query, key, value, d_out = (numbers.standard_normal((length, head_dim)) for _ in range(4))
        logits = query @ key.T * head_dim**-0.5
        lse = np.log(np.sum(np.exp(logits), axis=-1))
        weights = np.exp(logits - lse[:, None])
        out = weights @ value
        delta = np.sum(d_out * out, axis=-1)
        d_logits = weights * (d_out @ value.T - delta[:, None]) * head_dim**-0.5
        gradients = d_logits @ key, d_logits.T @ query, weights.T @ d_out
        return Problem(query, key, value, d_out, lse, delta, out, gradients)

    def _launch(self, file: str, entry: str, names: tuple[str, ...], tile: int, threads: int, **more: Any) -> Run:
        length, head_dim = self.query.shape
        source = f"#define HEAD_DIM {head_dim}\n#define TILE_SIZE {tile}\n{(FOLDER / file).read_text()}"
        parameters = np.zeros((), [("length", "<i4"), ("scale", "<f4")])
        parameters["length"], parameters["scale"] = length, head_dim**-0.5
        operands = [jnp.asarray(getattr(self, name), jnp.float32) for name in names] + more.pop("zeros", [])
        results = [jax.ShapeDtypeStruct(self.query.shape, jnp.float32)] * more.pop("results")
        grid = (length // tile, 1, 1)
        _ffi.forget_counters()
        got = _ffi.launch(source, entry, grid, (threads, 1, 1), parameters.tobytes(), operands, results, **more)
        return [np.asarray(array, np.float64) for array in got], list(_ffi.counters())

    def forward(self, step: Step) -> tuple[float, list[_ffi.Counters]]:
        """The largest error of the output, and the counts."""
        (out,), counts = self._launch(
            step.file, "attention", ("query", "key", "value"), step.tile, step.threads, results=1
        )
        return float(np.max(np.abs(out - self.out))), counts

    def _error(self, *gradients: np.ndarray) -> float:
        return max(float(np.max(np.abs(got - want))) for got, want in zip(gradients, self.gradients, strict=True))

    def backward_atomic(self) -> tuple[float, list[_ffi.Counters]]:
        """The largest error of the three gradients, and the counts."""
        zeros = [jnp.zeros(self.query.shape, jnp.float32)] * 2
        (d_key, d_value, d_query), counts = self._launch(
            "backward_atomic.metal", "backward", BACKWARD, 32, 32, zeros=zeros, results=3, aliases={6: 0, 7: 1}
        )
        return self._error(d_query, d_key, d_value), counts

    def backward_owned(self) -> tuple[float, list[_ffi.Counters]]:
        """The same of the two kernels without atomics."""
        (d_query,), counts = self._launch("backward_owned.metal", "d_query", BACKWARD, 32, 32, results=1)
        (d_key, d_value), more = self._launch("backward_owned.metal", "d_key_value", BACKWARD, 32, 32, results=2)
        return self._error(d_query, d_key, d_value), counts + more


def line(title: str, error: float, counts: list[_ffi.Counters]) -> tuple[str, ...]:
    """A step's counts, those of its kernels added up, and its largest error."""
    total = lambda count: sum(count(one) for one in counts)
    kib = lambda count: f"{total(count) / 1024:,.0f}"
    plain = lambda count: f"{total(count):,}"
    return (
        title,
        kib(lambda one: sum(one.bytes_read[:-1])),  # the last are the parameters, in constant memory
        kib(lambda one: sum(one.bytes_written)),
        kib(lambda one: one.threadgroup_bytes_read + one.threadgroup_bytes_written),
        plain(lambda one: one.matrix_multiplications),
        plain(lambda one: one.exponentials),
        plain(lambda one: one.threadgroup_barriers),
        plain(lambda one: one.atomics),
        f"{error:.1e}",
    )


if __name__ == "__main__":
    tyro.cli(main)
