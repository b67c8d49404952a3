"""The choice of what to do about queries and keys that are split over the same devices.

    ring        keys and values go round, and a device uses each as it comes by (`_sequence`)
    all_to_all  every device gets whole sequences of some of the heads, and returns their output (DeepSpeed Ulysses,
                arXiv:2309.14509)
    gather      every device gets all keys and values

The strategy with the least estimated time on the busiest device serves, unless the caller names one. Where all keys and
values are more than a device's own queries and output, only a call that names "gather" gets it: memory should fall with
the number of devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jflash._ring import SequenceSplit
from jflash._semantics.spec import Spec

FLOPS_PER_BYTE = 1300
"""The operations that a device computes while it receives a byte: an H200's 600 TFLOP/s of attention for 450 GB/s of
NVLink."""

PARTS = 1.05
"""The time that the parts of a call take together, relative to one call. It was measured on an H100, in chunks of
8,192."""

MERGING = 0.9
"""The time that a step of a ring takes to cut its runs and merge its results, relative to the time in which a device
receives as much as its queries and output. It was measured beside the kernels."""

_SAMPLES = 64
"""The number of rows of each device at which visible keys are counted."""


class Cost(NamedTuple):
    """The cost of a forward, for the busiest device and one batch entry."""

    flops: float
    received: float
    """The number of bytes that a device receives."""
    merged: float = 0
    """The number of bytes of queries and output that are cut and merged, over all steps of a ring."""
    overlapped: bool = False
    """Whether the device computes while it receives."""
    is_small: bool = True
    """Whether memory falls with the number of devices."""

    @property
    def time(self) -> float:
        """The time, in units of that in which a device receives a byte."""
        compute = self.flops / FLOPS_PER_BYTE
        busy = compute + self.merged * MERGING
        return max(busy, self.received) if self.overlapped else busy + self.received


class Strategy(NamedTuple):
    """The name of a strategy, and its reason in words for the user."""

    name: str
    reason: str


def choose(sequence: SequenceSplit, heads: int, key_heads: int) -> Strategy:
    """Return the strategy for a device with these numbers of heads.

    Raises:
      ValueError: if the call names one that cannot serve it.
    """
    found = costs(sequence, heads, key_heads)
    named = sequence.call.sequence_strategy
    if named is not None and named not in found:
        raise ValueError(
            "`sequence_strategy='all_to_all'` gives every device some of the heads, so the key heads must be a "
            f"multiple of the devices. Got K={key_heads} and {sequence.queries.count} devices."
        )
    allowed = [name for name, cost in found.items() if cost.is_small]
    name = named or min(allowed, key=lambda name: found[name].time)
    label = "ring, zigzag" if name == "ring" and sequence.zigzag else name
    if named is not None:
        return Strategy(name, f"{label}, as named")
    times = [f"{other} {cost.time / found[name].time:.2f} times" for other, cost in found.items() if other != name]
    return Strategy(name, f"{label}; by count, {' and '.join(times)} as long")


def costs(sequence: SequenceSplit, heads: int, key_heads: int) -> dict[str, Cost]:
    """Return the cost of every strategy that can serve, for a device with these numbers of heads."""
    call, count = sequence.call, sequence.queries.count
    width = (call.head_dim + call.value_dim) * call.dtype.itemsize
    # `queries` are the bytes of a device's queries and output, `keys` those of its keys and values.
    queries, keys = (length * n * width for length, n in zip(sequence.lengths, (heads, key_heads), strict=True))
    mean, most = _pairs(call, count)
    per_pair = 2 * heads * (call.head_dim + call.value_dim)
    balanced, unbalanced = per_pair * mean, per_pair * most
    # In a zigzag, half of what a device has is traded at the entry, and half of its output at the exit.
    traded = (queries + keys) / 2 if sequence.zigzag else 0
    sent = keys * (len(sequence.steps) - 1)
    merged = queries * len(sequence.steps)
    found = {
        "ring": Cost(PARTS * (balanced if sequence.zigzag else unbalanced), sent + traded, merged, overlapped=True),
        "all_to_all": Cost(balanced, (queries + keys) * (count - 1) / count),
        "gather": Cost(unbalanced, keys * (count - 1), is_small=keys * count <= queries),
    }
    if key_heads % count != 0:
        del found["all_to_all"]
    return found


def _pairs(call: Spec, count: int) -> tuple[float, float]:
    """Return how many pairs of a query and a key are visible, on average over devices and on the busiest one.

    It counts by what is known before the call.
    """
    rows = np.linspace(0, call.query_length - 1, _SAMPLES * count)
    (left, right), position = call.bounds, rows + (call.query_offset or 0)
    first = np.zeros_like(rows) if left is None else np.maximum(position - left, 0)
    last = np.full_like(rows, call.key_length - 1)
    if right is not None:
        last = np.minimum(position + right, last)
    visible = np.maximum(last - first + 1, 0).reshape(count, _SAMPLES).mean(axis=1) * call.query_length / count
    return float(visible.mean()), float(visible.max())
