"""The work of the Metal kernels, counted by the emulator, beside what their tiling cannot do without.

    python examples/benchmarks/metal_costs.py [--record]

None of these kernels has run on an Apple GPU, and counts are no times. But they show a kernel that reads more than it
needs, or that computes tiles without a visible pair.

The ideal, for blocks of R rows that stay and tiles of C rows that stream by (`jflash_metal._blocks`):

- device bytes: what a block owns is read once and written once. Each tile of the other side that has a visible pair is
  read once per block, as is its part of a bias [T, S], whose gradient is written once. A tile of queries is read a
  second time for dK where Q and dO do not fit into threadgroup memory together.
- 8x8x8 matrix products: R/8 * C/8 for each such tile, product and 8 features: two products forward, three for dQ, four
  for dK and dV.
- exponentials: one for each pair of each such tile.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import jflash
from jflash_metal import _blocks, _ffi

RECORD = Path(__file__).parent / "metal_costs.json"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A call: batch 1, equal lengths, no options but these."""

    dtype: str
    head_dim: int
    length: int = 512
    heads: int = 2
    key_heads: int = 1
    is_causal: bool = False
    window: int | None = None
    segments: int = 1
    """The number of segments of equal lengths; a query sees its own."""
    bias: bool = False
    """Whether there is a bias [1, N, T, S], float32, with its gradient."""

    def __str__(self) -> str:
        """Return the setting's line in the table."""
        form = "causal" if self.is_causal else f"window {self.window}" if self.window is not None else "full"
        packed = f" {self.segments} segments" if self.segments > 1 else ""
        return f"{self.dtype} d{self.head_dim} {form}{packed}{' bias' if self.bias else ''}"

    def visible(self) -> np.ndarray:
        """The visible pairs, `[T, S]`."""
        distance = np.arange(self.length) - np.arange(self.length)[:, None]
        seen = np.ones((self.length, self.length), bool)
        if self.is_causal:
            seen &= distance <= 0
        if self.window is not None:
            seen &= np.abs(distance) <= self.window
        own = self.segment_ids()
        return seen & (own == own[:, None])

    def segment_ids(self) -> np.ndarray:
        """The segment of each query, and of each key."""
        return np.arange(self.length) * self.segments // self.length


SETTINGS = [
    Setting("float32", 32),
    Setting("float32", 64),
    Setting("float32", 64, is_causal=True),
    Setting("float32", 64, window=100),
    Setting("float32", 128, is_causal=True),
    Setting("float32", 32, bias=True),
    Setting("float32", 64, is_causal=True, segments=4),
    Setting("bfloat16", 64),
    Setting("bfloat16", 64, is_causal=True),
    Setting("bfloat16", 128, is_causal=True),
    Setting("float16", 256, is_causal=True),
]


@dataclasses.dataclass(frozen=True)
class Cost:
    """The counts of one kernel in one setting."""

    setting: str
    kernel: str
    blocks: str
    device_bytes: int
    ideal_device_bytes: int
    products: int
    ideal_products: int
    exponentials: int
    ideal_exponentials: int
    threadgroup_bytes: int
    threadgroup_memory: int
    barriers: int


def ideal(setting: Setting, kernel: str) -> tuple[str, int, int, int]:
    """The blocks, and the least device bytes, matrix products and exponentials that they allow."""
    size, features = jnp.dtype(setting.dtype).itemsize, setting.head_dim
    rows_bytes = features * size
    length, heads, key_heads = setting.length, setting.heads, setting.key_heads
    if kernel == "delta":
        return "", heads * length * (2 * rows_bytes + 3 * 4), 0, 0
    sizes = _blocks.blocks_of(size, features, features)
    block = {"forward": sizes.forward, "d_query": sizes.d_query, "d_key_value": sizes.d_key_value}[kernel]
    seen = setting.visible() if kernel != "d_key_value" else setting.visible().T
    tiles, streamed = visible_tiles(seen, block.rows, block.columns)
    tiles, streamed = tiles * heads, streamed * heads
    products, own, stream = {
        "forward": (2, heads * length * (2 * rows_bytes + 4), 2 * rows_bytes),
        "d_query": (3, heads * length * (3 * rows_bytes + 8), 2 * rows_bytes),
        "d_key_value": (4, key_heads * length * 4 * rows_bytes, (4 - block.streams) * rows_bytes + 8),
    }[kernel]
    pairs = tiles * block.rows * block.columns
    if setting.bias:
        own += 4 * pairs + (4 * heads * length**2 if kernel == "d_query" else 0)
    if setting.segments > 1:
        own, stream = own + 4 * heads * length, stream + 4
    return f"{block.rows}x{block.columns}", own + streamed * stream, pairs * products * features // 512, pairs


def visible_tiles(seen: np.ndarray, rows: int, columns: int) -> tuple[int, int]:
    """The number of tiles with a visible pair, and of their columns."""
    tiles = seen.reshape(len(seen) // rows, rows, -1, columns).any(axis=(1, 3))
    return int(tiles.sum()), int(tiles.sum()) * columns


def costs(setting: Setting) -> Iterator[Cost]:
    """Return the counts of the four kernels of one forward and backward."""
    shape = lambda heads: (1, setting.length, heads, setting.head_dim)
    arrays = [
        jax.random.normal(jax.random.key(seed), shape(heads), setting.dtype)
        for seed, heads in enumerate((setting.heads, setting.key_heads, setting.key_heads, setting.heads))
    ]

    options = dict(is_causal=setting.is_causal, local_window_size=setting.window)
    if setting.segments > 1:
        options["segment_ids"] = jnp.asarray(setting.segment_ids())[None]
    biases = [jnp.zeros((1, setting.heads, setting.length, setting.length))] if setting.bias else []

    def attend(*arrays: jax.Array) -> jax.Array:
        return jflash.attention(*arrays, implementation="metal", **options)

    _ffi.forget_counters()
    _, pull_back = jax.vjp(attend, *arrays[:3], *biases)
    jax.block_until_ready(pull_back(arrays[3]))
    for counted in _ffi.counters():
        blocks, device_bytes, products, exponentials = ideal(setting, counted.entry)
        yield Cost(
            str(setting),
            counted.entry,
            blocks,
            # The last buffer is the parameters, in constant memory.
            sum(counted.bytes_read[:-1]) + sum(counted.bytes_written),
            device_bytes,
            counted.matrix_multiplications,
            products,
            counted.exponentials,
            exponentials,
            counted.threadgroup_bytes_read + counted.threadgroup_bytes_written,
            counted.threadgroup_memory,
            counted.threadgroup_barriers,
        )


def main(record: bool = False) -> None:
    """Count, and print the table.

    Args:
      record: also write metal_costs.json.
    """
    reason = _ffi.available()
    if reason is not None or _ffi.host() != "emulator":
        raise SystemExit(reason or "Only the emulator counts; this library runs shaders on a GPU.")
    table = Table(title="512 queries and keys, 2 query heads on 1 key head; measured / ideal (times the ideal)")
    for column in (
        "",
        "kernel",
        "blocks",
        "device KiB",
        "matrix products",
        "exponentials",
        "threadgroup KiB",
        "barriers",
    ):
        table.add_column(column, justify="left" if column in ("", "kernel", "blocks") else "right", no_wrap=True)
    every = [cost for setting in SETTINGS for cost in costs(setting)]
    for cost in every:
        beside = lambda got, least, unit=1: (
            f"{got / unit:,.0f} / {least / unit:,.0f} ({got / least:.2f})" if least else "0"
        )
        table.add_row(
            cost.setting,
            cost.kernel,
            cost.blocks,
            beside(cost.device_bytes, cost.ideal_device_bytes, 1024),
            beside(cost.products, cost.ideal_products),
            beside(cost.exponentials, cost.ideal_exponentials),
            f"{cost.threadgroup_bytes / 1024:,.0f}",
            f"{cost.barriers:,}",
        )
    Console(width=180).print(table)
    if record:
        RECORD.write_text(json.dumps([dataclasses.asdict(cost) for cost in every], indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
