"""The size of tiles, and how they are computed: a policy for CPUs, and one for GPUs and all else.

A CPU is fast where a tile stays in its caches between two products. A GPU's caches are too small for that, and each
step of a loop costs it launches. So its tiles are few and large, and each pass over one costs time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from jflash import _platform, _tuning
from jflash._platform import Platform
from jflash._semantics import visits
from jflash._semantics.coverage import TILE
from jflash._semantics.spec import Spec
from jflash._semantics.tile import TileShape
from jflash._tuning import TuningKey

Kind = Literal["alike", "whole rows", "masked", "narrow window", "listed"]
"""The kinds of call for which tiles are chosen.

Where every row sees the same keys, tiles leave nothing out, whatever their size. A CPU's backward then takes rows with
all their keys: one kernel makes a product, the row's sum of it, and dS. In a narrow window, one tile holds all that a
few rows see: little of it is outside the window, and nothing is rescaled. Where blocks have lists of tiles, small ones
leave out more.
"""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The approximate size of tiles."""

    rows: int
    keys: int
    logits: int
    """The number of logits in one tile of several, which has as many heads and batch entries as that takes."""


@dataclasses.dataclass(frozen=True)
class Tiles(TileShape):
    """A tile's shape, and how tiles are computed."""

    by_passes: bool = False
    """Whether time goes by the passes over a tile rather than by what is computed."""
    held_keys: int | None = None
    """The most keys up to which a row is taken as whole (`tiling.holds_rows`), if one tile is not the call; `None`:
    any."""
    listed: bool = False
    """Whether blocks have lists of the tiles that they visit, and not ranges of keys."""


_CPU_ROWS, _CPU_WINDOW = 128, 1280
"""The rows of a narrow window's tile, and the most keys that they may see together."""

CPU: Mapping[Kind, Sequence[Blocks]] = {
    "alike": [
        Blocks(512, 512, 2**20),
        Blocks(1024, 512, 2**20),
        Blocks(1024, 1024, 2**20),
        Blocks(512, 512, 2**19),
        Blocks(1024, 256, 2**19),
        Blocks(512, 512, 2**18),
        Blocks(256, 256, 2**18),
    ],
    "whole rows": [
        Blocks(512, 8192, 2**20),
        Blocks(512, 8192, 2**19),
        Blocks(256, 4096, 2**19),
        Blocks(512, 512, 2**20),
        Blocks(512, 512, 2**19),
    ],
    "masked": [
        Blocks(512, 512, 2**19),
        Blocks(512, 512, 2**20),
        Blocks(1024, 512, 2**20),
        Blocks(512, 256, 2**20),
        Blocks(256, 512, 2**18),
        Blocks(256, 256, 2**18),
    ],
    "narrow window": [
        Blocks(_CPU_ROWS, _CPU_WINDOW, 2**20),
        Blocks(256, _CPU_WINDOW, 2**20),
        Blocks(64, _CPU_WINDOW, 2**20),
        Blocks(_CPU_ROWS, _CPU_WINDOW, 2**18),
        Blocks(_CPU_ROWS, 512, 2**18),
    ],
    "listed": [
        Blocks(256, 256, 2**18),
        Blocks(256, 256, 2**19),
        Blocks(512, 256, 2**19),
        Blocks(512, 512, 2**20),
        Blocks(128, 256, 2**18),
        Blocks(128, 128, 2**18),
    ],
}
"""The candidates on a CPU, the default first.

They have enough logits that loops cost little and every core has work, and few enough that these stay in a laptop's
cache between the two matrix products.
"""

_GPU_ROWS, _GPU_WINDOW = 1024, 2304

GPU: Mapping[Kind, Sequence[Blocks]] = {
    "alike": [Blocks(4096, 4096, 2**27), Blocks(4096, 4096, 2**28), Blocks(2048, 2048, 2**26)],
    "masked": [Blocks(4096, 4096, 2**27), Blocks(2048, 2048, 2**27), Blocks(2048, 2048, 2**26)],
    "narrow window": [Blocks(_GPU_ROWS, _GPU_WINDOW, 2**27), Blocks(256, _GPU_WINDOW, 2**26)],
    "listed": [Blocks(2048, 2048, 2**27), Blocks(4096, 4096, 2**27), Blocks(1024, 1024, 2**26)],
}
"""The candidates on a GPU, the default first.

2**27 logits are 512 MiB in float32, and a backward holds up to four tiles. With fewer keys at once, output would be
rescaled, and gradients added up, more often than the skipped tiles are worth.
"""

_GPU_HELD_KEYS = 256
"""The most keys up to which a row is taken as whole on a GPU.

A row's own sums take two more passes over its tile than the log-sum-exp does. They are more exact, and that shows where
there are few keys.
"""


_CPU_PAGES, _GPU_PAGES = Blocks(512, 512, 2**20), Blocks(1024, 1024, 2**26)
"""The tiles of paged calls. `logits` also bounds the numbers that a tile takes out of the pages."""


def plan(spec: Spec, work: Literal["forward", "backward"]) -> Tiles:
    """Return the tiles of a call."""
    on_cpu = is_cpu(_platform.current())
    if spec.pages is not None:
        return _of_pages(spec, _CPU_PAGES if on_cpu else _GPU_PAGES)
    tables, rows, window = (CPU, _CPU_ROWS, _CPU_WINDOW) if on_cpu else (GPU, _GPU_ROWS, _GPU_WINDOW)
    kind = _kind(spec, rows, window, on_cpu=on_cpu)
    if kind == "alike" and on_cpu and work == "backward":
        kind = "whole rows"
    blocks = _tuning.choose(TuningKey(f"xla {work}", (kind,)), tables[kind])
    tiles = _on_cpu if on_cpu else _on_gpu
    return tiles(spec, blocks, listed=kind == "listed")


def is_cpu(platform: Platform) -> bool:
    """Return whether the CPU's policy is the platform's."""
    return platform.name == "cpu"


def seen_at_once(spec: Spec) -> int | None:
    """Return how many keys a query may see besides its own, or `None` unless both sides are limited."""
    left, right = spec.bounds
    return None if left is None or right is None else left + right


def _kind(spec: Spec, rows: int, window: int, *, on_cpu: bool) -> Kind:
    seen = seen_at_once(spec)
    is_narrow = seen is not None and seen + rows <= window
    may_be_sparse = visits.has_map(spec) or (on_cpu and _may_be_sparse(spec))
    if spec.mask_mod is not None or (may_be_sparse and not is_narrow):
        return "listed"
    if spec.bounds == (None, None) and "query_segments" not in spec.operands:
        return "alike"
    return "narrow window" if is_narrow else "masked"


def _may_be_sparse(spec: Spec) -> bool:
    """Return whether segments, or a mask of both queries and keys, may leave tiles empty where no range says so."""
    return visits.has_gaps(spec) or "query_segments" in spec.operands


def _on_cpu(spec: Spec, blocks: Blocks, *, listed: bool) -> Tiles:
    # Listed blocks are made of tiles of the map, which begin at multiples of their size.
    step = TILE if listed else 16
    rows = min(blocks.rows, blocks.logits // max(min(blocks.keys, spec.key_length), 1))
    queries = _even(spec.query_length, max(rows // spec.group, 16), step)
    keys = _even(spec.key_length if listed else _seen(spec, queries), blocks.keys, step)
    return Tiles(*_filled(spec, blocks, queries, keys), listed=listed)


def _on_gpu(spec: Spec, blocks: Blocks, *, listed: bool) -> Tiles:
    """Return one tile for a call of up to twice `Blocks.logits`: two steps would copy more, and both passes share one
    tile.

    In larger calls, few rows see more keys at once, few keys are seen by more rows, and few heads have more of both.
    """
    heads = spec.batch * spec.heads
    if heads * spec.query_length * spec.key_length <= 2 * blocks.logits:
        return Tiles(spec.batch, spec.key_heads, spec.query_length, spec.key_length, True, _GPU_HELD_KEYS)
    larger = max(1, math.isqrt(blocks.logits // (heads * blocks.rows * blocks.keys)))
    rows, keys = larger * blocks.rows, larger * blocks.keys
    allowed = blocks.logits // (spec.group * min(keys, spec.key_length))
    most = max(min(max(rows, rows * keys // spec.key_length), allowed) // 16 * 16, 16)
    step = TILE if listed else 16
    queries = _even(spec.query_length, most, step)
    seen = spec.key_length if listed else _seen(spec, queries)
    keys = _even(seen, max(keys, rows * keys // queries), step)
    return Tiles(*_filled(spec, blocks, queries, keys), True, _GPU_HELD_KEYS, listed)


def _of_pages(spec: Spec, blocks: Blocks) -> Tiles:
    """Return tiles of so few keys that a walk ends soon after the longest length.

    A tile takes all key heads first, as a row of the cache has them all. With a window each batch entry sees other
    keys, so it walks alone.
    """
    queries = _even(spec.query_length, max(blocks.rows // spec.group, 16))
    keys = _even(_seen(spec, queries), blocks.keys)
    taken = keys * max(spec.group * queries, spec.head_dim + spec.value_dim)
    key_heads = _divisor(spec.key_heads, blocks.logits // taken)
    alone = key_heads < spec.key_heads or spec.bounds[0] is not None
    batch = 1 if alone else _divisor(spec.batch, blocks.logits // (taken * key_heads))
    return Tiles(batch, key_heads, queries, keys)


def _filled(spec: Spec, blocks: Blocks, queries: int, keys: int) -> tuple[int, int, int, int]:
    """Return a tile's shape, of as many heads, then batch entries, as `Blocks.logits` allows."""
    logits = spec.group * queries * keys
    key_heads = _divisor(spec.key_heads, blocks.logits // logits)
    batch = _divisor(spec.batch, blocks.logits // (logits * key_heads)) if key_heads == spec.key_heads else 1
    return batch, key_heads, queries, keys


def _seen(spec: Spec, queries: int) -> int:
    """Return how many keys consecutive queries of that number see together at most."""
    window = seen_at_once(spec)
    return spec.key_length if window is None else min(spec.key_length, window + queries)


def _even(length: int, most: int, step: int = 16) -> int:
    """Return the block that cuts `length` into the fewest parts of at most about `most`, all nearly alike."""
    parts = -(-length // most)
    return min(length, -(-length // (step * parts)) * step)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    return max(d for d in range(1, number + 1) if number % d == 0 and (d <= most or d == 1))
