"""Counts, on paper, what long contexts cost each device, by every strategy: bytes received, FLOPs, memory, time.

    python examples/benchmarks/long_context.py

Causal attention, head dimension 128, 32 query heads on 8 key heads, bfloat16, one sequence, on H200s: 600 TFLOP/s
forward and 550 backward, 450 GB/s to receive by NVLink among the eight of a host, 50 GB/s beyond. What all devices of
a host want from beyond comes once to the host, at the 400 GB/s of its eight, and goes round inside by NVLink: gathering
is not bound by one device's 50 GB/s, as a step of a ring is. The forward is what jflash itself counts to choose
(`jflash._sequence_strategy.costs`). What a ring sends runs beside its kernels; what it trades at its ends, the last way
home of its gradients, and all that other strategies receive, does not. The page experiments/2026-11-24-sequences.md has
the table, and the times of a hop's kernels that were measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jflash import _sequence_strategy
from jflash._ring import Ring, SequenceSplit
from jflash._semantics.spec import Operands, Spec, shape_facts

HEADS, KEY_HEADS, DIM, HOST = 32, 8, 128, 8
FORWARD, BACKWARD = 600e12, 550e12
"""The rate of attention in FLOP/s."""
NVLINK, NETWORK = 450e9, 50e9
"""The bytes that a GPU receives in a second."""
LENGTHS = {"128k": 2**17, "1M": 2**20, "4M": 2**22}
DEVICES = (8, 64, 512)


class Pass(NamedTuple):
    """A forward or a backward on the busiest device."""

    flops: float
    received: float
    """The bytes that the device receives."""
    time: float
    """The time in seconds."""
    ideal: float
    """The time in which all devices would do the sums alone, if none waited for another."""


class Row(NamedTuple):
    """One strategy on some number of devices."""

    length: str
    devices: int
    strategy: str
    forward: Pass
    backward: Pass
    memory: float
    """The bytes of the arrays of a backward, on each device."""


@dataclasses.dataclass(frozen=True)
class Ways:
    """A call whose sequences are split over `count` devices, and the heads that each has."""

    length: int
    count: int
    heads: int = HEADS
    key_heads: int = KEY_HEADS
    zigzag: bool = True

    @property
    def split(self) -> SequenceSplit:
        """The split as jflash makes it. A query offset is why there would be no zigzag."""
        shape = lambda heads: jax.ShapeDtypeStruct((1, self.length, heads, DIM), jnp.bfloat16)
        facts = shape_facts(Operands(shape(self.heads), shape(self.key_heads), shape(self.key_heads)), None)
        ring = Ring(("x",), self.count)
        return SequenceSplit(Spec(**facts, is_causal=True, query_offset=0 if self.zigzag else 1), ring, ring)

    @property
    def queries(self) -> float:
        """The bytes of a device's queries and output."""
        return self.length / self.count * self.heads * 2 * DIM * 2

    @property
    def keys(self) -> float:
        """The bytes of a device's keys and values."""
        return self.length / self.count * self.key_heads * 2 * DIM * 2

    def cost(self, strategy: str) -> _sequence_strategy.Cost:
        """Return the cost of a forward."""
        return _sequence_strategy.costs(self.split, self.heads, self.key_heads)[strategy]


def passes(way: Ways, strategy: str, link: float, exchanged: float = 0) -> tuple[Pass, Pass]:
    """Return forward and backward. A ring of hosts has `exchanged` bytes of a forward by heads inside of them, by
    NVLink."""
    cost = way.cost(strategy)
    ideal = 4 * DIM * way.heads * way.length**2 / 2 / way.count
    traded = (way.queries + way.keys) / 2 if strategy == "ring" and way.zigzag else 0
    sent = cost.received - traded
    merged = cost.merged * _sequence_strategy.MERGING / NVLINK
    # The backward has five products for two; float32 gradients of keys go round with keys, and more is traded. With the
    # last hop they come home, when nothing is left to compute.
    back = {"ring": 3 * sent, "all_to_all": 2 * sent, "gather": 3 * sent}[strategy]
    back_traded = 2 * traded + (2 * way.keys if strategy == "ring" else 0)
    made: list[Pass] = []
    for flops, rate, moved, ends, inside, whole in (
        (cost.flops, FORWARD, sent, traded, exchanged, ideal),
        (2.5 * cost.flops, BACKWARD, back, back_traded, 2 * exchanged, 2.5 * ideal),
    ):
        busy, moving = flops / rate + merged, moved / link
        time = max(busy, moving) if cost.overlapped else busy + moving
        made.append(Pass(flops, moved + ends + inside, time + ends / link + inside / NVLINK, whole / rate))
    return made[0], made[1]


def rows() -> Iterator[Row]:
    """Return the rows of the table."""
    for (label, length), devices in ((item, devices) for item in LENGTHS.items() for devices in DEVICES):
        link = NVLINK if devices <= HOST else NETWORK
        whole = Ways(length, devices)
        memory = 4.5 * whole.queries + 8 * whole.keys
        for name, way in (("ring, zigzag", whole), ("ring, in order", dataclasses.replace(whole, zigzag=False))):
            yield Row(label, devices, name, *passes(way, "ring", link), memory)
        gathered = memory + 3 * whole.keys * (devices - 1)
        yield Row(label, devices, "gather", *passes(whole, "gather", min(NVLINK, HOST * link)), gathered)
        if devices <= KEY_HEADS:
            yield Row(label, devices, "all_to_all", *passes(whole, "all_to_all", link), memory)
        else:
            # All-to-all over the heads of a host, and a ring of hosts.
            inside = Ways(length, devices // HOST, HEADS // HOST, KEY_HEADS // HOST)
            exchanged = (whole.queries + whole.keys) * (HOST - 1) / HOST
            yield Row(label, devices, "both", *passes(inside, "ring", link, exchanged), memory)


def number(value: float) -> str:
    """Return a number with three digits, or all that are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Print the table."""
    table = Table("tokens", "GPUs", "strategy", "TFLOP", "receives, GB", "ms", "of ideal", "GB a GPU")
    for row in rows():
        both = row.forward, row.backward
        pair = lambda of, both=both: " / ".join(of(one) for one in both)
        table.add_row(
            row.length,
            str(row.devices),
            row.strategy,
            pair(lambda one: number(one.flops / 1e12)),
            pair(lambda one: f"{one.received / 1e9:.2g}"),
            pair(lambda one: number(one.time * 1e3)),
            pair(lambda one: f"{one.ideal / one.time:.2f}"),
            number(row.memory / 1e9),
            end_section=row.strategy in ("all_to_all", "both"),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
