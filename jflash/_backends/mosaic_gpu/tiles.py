"""Tiles in shared memory: how they are laid out, and which sizes a kernel takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash import _tuning
from jflash._backends.mosaic_gpu.rounds import Device, Rounds, plan
from jflash._tuning import Question

ROWS = 64
"""Rows of a tile that one warpgroup works on: the matrix unit's own number."""
SHARED_MEMORY = 227 * 1024 - 256
"""Bytes that a block may have on Hopper (CUDA programming guide, compute capability 9.0), less what barriers need."""

COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""How all kernels are compiled.

Without a warpgroup's barriers before and after every access to shared memory. They would be needed where a thread reads
what another of its warpgroup wrote, or the other way round. Here only copies and products, after a commit, read what a
warpgroup's threads wrote, or another warpgroup after a barrier of the kernel's own; and only those write what it reads.
"""


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def whole(shape: tuple[int, ...], axis: int = 1) -> tuple[int, ...]:
    """`[B, L, N, H]` (L at `axis`) with L a multiple of 8 and H of 16 (or 8): what copies of tiles ask of an array."""
    rows, columns = round_up(shape[axis], 8), shape[3] if shape[3] <= 8 else round_up(shape[3], 16)
    return *shape[:axis], rows, *shape[axis + 1 : 3], columns


def shared(shape: tuple[int, ...], dtype: Any, *divides: int, part: int | None = None) -> Any:
    """Shared memory for tiles `[..., rows, columns]`, in the widest swizzle whose columns divide theirs.

    Swizzled, eight rows of 16 bytes lie in different banks, as the matrix unit reads them.

    Args:
      shape, dtype: of the tiles.
      divides: more numbers that a swizzle's columns must divide or exceed: the columns of an array in device memory
        that tiles are copied from or to, or of the tiles that they are multiplied with.
      part: the columns that a product takes of these tiles, or of those with which it needs the same swizzle: whole
        swizzles too.
    """
    size = np.dtype(dtype).itemsize
    whole = (shape[-1], part or shape[-1])
    fits = lambda n: all(m % n == 0 for m in whole) and all(m <= n or m % n == 0 for m in divides)
    swizzle = next(width for width in (128, 64, 32) if fits(width // size))
    tiling, swizzling = plgpu.TilingTransform, plgpu.SwizzleTransform
    transforms: Any = tiling((8, swizzle // size)), swizzling(swizzle)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def columns(width: int, available: int, zero: Any) -> Any:
    """The first `width` columns of an array in device memory that may have fewer: those missing are read as 0.

    A slice past the end must begin at an index that is not static; `zero` is any, times 0.
    """
    return pl.ds(0, width) if width <= available else pl.ds(zero * 0, width)


def vectors(shape: tuple[int, ...]) -> Any:
    """Shared memory for float32 vectors `[..., length]`."""
    return plgpu.SMEM(shape, jnp.float32)


def registers(warpgroups: int, *, copies: bool) -> None:
    """Give the registers of the warpgroup that copies to the `warpgroups` that compute; called once by each.

    Together all that a block has at first, as many for each as its threads leave in multiples of 8 of 512: 168 for
    three warpgroups, 128 for four, 96 for five. Who asked for more would wait forever.
    """
    if warpgroups == 1:
        return
    compute, copy = {2: (240, 24), 3: (160, 32), 4: (112, 32)}[warpgroups]
    if copies:
        plgpu.set_max_registers(copy, action="decrease")
    else:
        plgpu.set_max_registers(compute, action="increase")


def moving_zero(step: Any, warpgroup: Any) -> Any:
    """0, but the compiler cannot know: the index of a tile that stays where it is throughout a loop over `step`.

    It would otherwise keep the addresses of all the tile's parts in registers for the whole loop, where there are none
    left, and read them back from local memory in every step; computing them anew costs an addition each.
    """
    return lax.shift_right_logical(step + warpgroup, 30)


def unknown(count: Any, *axes: str) -> Any:
    """`count`, but the compiler cannot know it, as it does not know indices of the grid's `axes`: how many tiles a loop
    copies.

    It would write out some of the copies one by one. From that, ptxas (CUDA 13.5) once made a copy from a wrong place:
    a coordinate that is 0 was taken from a register that still held an address. With fewer of a grid's axes than there
    are d256 spills more: the forward in rounds 68 and 72 bytes for 32 and 8 (JAX 0.12), dQ's kernel 36 for 32.
    """
    number = sum(map(lax.axis_index, axes))
    return count + lax.bitwise_and(number * (number + 1), 1)


def for_each_copy(count: Any, copy: Callable[[Any], None], *axes: str) -> None:
    """`copy(index)` for `count` tiles; `axes` as for `unknown`."""

    def body(index: Any, carry: int) -> int:
        copy(index)
        return carry

    lax.fori_loop(0, unknown(count, *axes), body, 0)


def release(stages: int, *free: Any) -> None:
    """Nothing of a block's tiles is in use at first; called once by each warpgroup that will read them.

    So copies wait for every tile alike, the first ones too.
    """
    for barriers in free:
        for slot in range(stages):
            plgpu.barrier_arrive(barriers.at[slot])


def drain(stages: int, *free: Any) -> None:
    """Wait until the last tiles have been read: a barrier may not end in the middle of its phase."""
    for barriers in free:
        for slot in range(stages):
            plgpu.barrier_wait(barriers.at[slot])


Visits = Callable[[int, int], Sequence[int]]
"""How many tiles of so many keys each block of so many rows visits, the first rows' first."""

_PACE = {2: (0.61, 0.52), 3: (0.51, 0.55), 4: (0.59, 0.35)}
"""How long 64 rows take for 128 keys, and to begin and end, with so many warpgroups: microseconds of one multiprocessor
at head dim 64. Three have the matrix unit at work most, four wait least for what takes its time."""


class Sizes(NamedTuple):
    """Of a forward's tiles."""

    head_dim: int
    value_dim: int
    pair_bytes: int = 0
    """Bytes for each logit that tiles of the bias take."""
    bias_columns: int = 0
    """More columns of keys, for a bias of keys: see `key_columns`."""


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tiles of the forward kernel."""

    warpgroups: int
    """Warpgroups that compute, each on 64 rows of queries."""
    keys: int
    stages: int
    """Tiles of keys and values that are in shared memory together."""

    @property
    def rows(self) -> int:
        """Query rows of one block."""
        return ROWS * self.warpgroups

    def bytes(self, sizes: Sizes, out_bytes: int) -> int:
        """Shared memory, with elements of 2 bytes, but `out_bytes` of the output."""
        head_dim, value_dim, pair_bytes, bias_columns = sizes
        queries = self.rows * max(head_dim * 2, value_dim * out_bytes)
        stage = self.keys * (head_dim + bias_columns + value_dim) * 2 + self.rows * self.keys * pair_bytes
        mark = self.rows * 4
        return queries + mark + self.stages * stage

    def out_parts(self, sizes: Sizes) -> int:
        """In how many parts, one after the other, the output may leave from a place of its own; 0 if there is no room
        for one."""
        left = SHARED_MEMORY - self.bytes(sizes, 2)
        possible = (1, 2) if sizes.value_dim % 128 == 0 else (1,)
        return next((parts for parts in possible if self.rows * sizes.value_dim // parts * 2 <= left), 0)

    def times(self, rows: int, visits: Visits) -> list[float]:
        """How long each block takes, if `rows` are all there are; in units for tiles of the same head dim."""
        visit, beginning = _PACE[self.warpgroups]
        absent = self.missing(rows) // ROWS
        present = self.warpgroups - absent
        if self.rows > self.keys:
            # Each warpgroup leaves out what its own rows do not see.
            visited = visits(ROWS, self.keys)
        else:
            each = visits(self.rows, self.keys)
            visited = [count for count in each for _ in range(self.warpgroups)][absent:]
        own = [visit * self.keys / 128 * count + beginning for count in visited]
        # The others wait for some of what a warpgroup without rows would have done.
        first, rest = sum(own[:present]) * (1 + 0.6 * absent / present), own[present:]
        return [first, *(sum(rest[at : at + self.warpgroups]) for at in range(0, len(rest), self.warpgroups))]

    def missing(self, rows: int) -> int:
        """How many of its rows the first of a head's blocks does without, if there are so many rows.

        Not the last: where queries see what is before them, the first one has least to do.
        """
        return -round_up(rows, ROWS) % self.rows

    def rounds(
        self,
        sizes: Sizes,
        visits: Sequence[int],
        rows: int,
        batch: int,
        heads: int,
        processors: int | None,
        *,
        lengths_differ: bool,
        known_late: bool,
    ) -> Rounds:
        """Which blocks of queries each block of the grid takes.

        Args:
          sizes: of the tiles.
          visits: how many tiles of keys each block of queries visits.
          rows: query rows that there are.
          batch, heads: how many there are.
          processors: of the device; `None`: nobody knows.
          lengths_differ: whether each block visits more keys than the one before.
          known_late: whether arrays, and not the call alone, say what a block visits.
        """
        # Longest blocks begin first. Where they differ, those of several heads leave fewer processors waiting for the
        # last one: at head dim 64, with 32 heads, 4 sections are 3% faster than one; at 128 and 256 all are as good.
        sections = heads // math.gcd(heads, 8) if lengths_differ and self.warpgroups > 2 else 1
        one = Rounds(len(visits), batch, sections=sections, turned=known_late)
        parts = self.out_parts(sizes)
        if processors is None or not (parts or sizes.head_dim == sizes.value_dim):
            return one
        # Tiles of fewer rows take less time, if not in proportion.
        first = visits[0] * (1 - 0.6 * self.missing(rows) / self.rows)
        # Three warpgroups wait for the slowest. Where the output leaves in two parts, queries and keys have more
        # columns, and take longer to come. Where it takes the place of the queries, the next round's come when it has
        # left, which takes about half of what a round saves.
        beginning = 3.0 if self.warpgroups > 2 else (0.6, 1.0, 1.5)[parts]
        return plan(one, (*visits[:0:-1], first), heads, Device(processors, beginning, self.keys * sum(sizes[:2]) * 2))


def forward_tiles(sizes: Sizes, rows: int, visits: Visits, processors: float, most: int) -> ForwardTiles:
    """The fastest tiles that fit in shared memory and registers.

    Args:
      sizes: of the tiles.
      rows: query rows that there are.
      visits: how many tiles of so many keys each block of so many rows visits, about.
      processors: of the device, for each head of a batch entry; 0: nobody knows.
      most: warpgroups for which the call leaves registers.
    """
    head_dim, value_dim, pair_bytes, _ = sizes
    if rows <= ROWS:
        candidates = [ForwardTiles(1, *size) for size in ((128, 2), (64, 2), (64, 1))]
    else:
        candidates = [ForwardTiles(2, *size) for size in ((128, 2), (64, 2), (64, 1))]
        if max(head_dim, value_dim) <= 64 and not pair_bytes:
            differ = len(set(visits(4 * ROWS, 64))) > 1
            several = (candidates[0], ForwardTiles(3, 128, 2), ForwardTiles(4, 64, 3 if differ else 4))

            def time(tile: ForwardTiles) -> float:
                each = tile.times(rows, visits)
                return max(sum(each), max(each) * processors)

            candidates = sorted((tile for tile in several if tile.warpgroups <= most), key=time)
    # What one block does alone it may have to share with others, in float32.
    out_bytes = lambda t: 4 if rows <= t.rows else 2
    fitting = [t for t in candidates if t.bytes(sizes, out_bytes(t)) <= SHARED_MEMORY]
    question = Question("mosaic_gpu forward", (head_dim, value_dim, pair_bytes, "short" if rows <= ROWS else "long"))
    return _tuning.choose(question, fitting)


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the fused backward, in which two warpgroups compute, each on 64 keys."""

    queries: int
    stages: int
    """Tiles of queries that are in shared memory together."""

    @property
    def keys(self) -> int:
        """Keys of one block."""
        return 2 * ROWS

    @property
    def by_rows(self) -> bool:
        """Whether each warpgroup makes half the rows of a tile's dQ, or half its columns: the matrix unit wants 64
        rows at least."""
        return self.queries == 2 * ROWS

    def columns(self, head_dim: int) -> int:
        """Columns of tiles of queries, keys and values: so many that a half of them makes whole swizzles."""
        return round_up(head_dim, 32)

    def bytes(self, head_dim: int, value_dim: int, pair_bytes: int) -> int:
        """Shared memory, with elements of 2 bytes and `pair_bytes` for each logit of a tile of bias and mask."""
        head_dim, value_dim = self.columns(head_dim), self.columns(value_dim)
        # Without bias and mask, lse and delta may be columns: see `statistics`.
        numbers, ones = (8, 0) if pair_bytes else (32, 2 * ROWS * 32)
        stage = self.queries * ((head_dim + value_dim) * 2 + numbers + self.keys * pair_bytes)
        d_products, d_query = 2 * self.keys * self.queries * 2, self.queries * head_dim * 4
        return self.keys * (head_dim + value_dim) * 2 + ones + d_products + d_query + self.stages * stage


def backward_tiles(head_dim: int, value_dim: int, pair_bytes: int, *, plain: bool) -> BackwardTiles | None:
    """The fastest tiles that fit in shared memory and registers; `None` if none do.

    Args:
      head_dim, value_dim: columns of the tiles.
      pair_bytes: bytes for each logit that tiles of bias and mask take.
      plain: whether logits are products times a number. Others spill up to 750 bytes with tiles of 128 queries, and
        take 16 to 68% longer with a soft cap or ALiBi.
    """
    widest = max(head_dim, value_dim)
    candidates = [BackwardTiles(128, 2)] if widest <= 64 and plain else []
    if widest <= 128:
        candidates += [BackwardTiles(64, 2), BackwardTiles(64, 1)]
    fitting = [t for t in candidates if t.bytes(head_dim, value_dim, pair_bytes) <= SHARED_MEMORY]
    question = Question("mosaic_gpu backward", (head_dim, value_dim, pair_bytes))
    return _tuning.choose(question, fitting) if fitting else None


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Tiles of the kernel that makes dQ alone."""

    warpgroups: int
    """Warpgroups that compute, each on 64 rows of queries."""
    keys: int
    key_stages: int
    value_stages: int
    """Tiles of keys, and of values, that are in shared memory together: values are needed for a shorter time."""

    @property
    def rows(self) -> int:
        """Query rows of one block."""
        return ROWS * self.warpgroups

    def bytes(self, head_dim: int, value_dim: int, pair_bytes: int) -> int:
        """Shared memory, with elements of 2 bytes and `pair_bytes` for each logit of a tile of bias and mask."""
        values = self.value_stages * (self.keys * value_dim * 2 + self.rows * self.keys * pair_bytes)
        return self.rows * (head_dim + value_dim) * 2 + self.key_stages * self.keys * head_dim * 2 + values


def query_tiles(head_dim: int, value_dim: int, pair_bytes: int) -> QueryTiles:
    """The fastest tiles that fit in shared memory."""
    sizes = [(2, 128, 2, 2)] if max(head_dim, value_dim) <= 64 else []
    sizes += [(2, 64, 2, 2), (2, 64, 2, 1), (1, 64, 2, 1), (1, 64, 1, 1)]
    candidates = [QueryTiles(*size) for size in sizes]
    fitting = [t for t in candidates if t.bytes(head_dim, value_dim, pair_bytes) <= SHARED_MEMORY]
    return _tuning.choose(Question("mosaic_gpu dQ", (head_dim, value_dim, pair_bytes)), fitting)


@dataclasses.dataclass(frozen=True)
class BiasTiles:
    """Tiles of the kernel that makes a bias's gradient: one of each array at a time, but for the bias."""

    warpgroups: int
    """Warpgroups that compute, each on 64 rows of queries."""
    keys: int
    stages: int
    """Tiles of the bias that are in shared memory together."""

    @property
    def rows(self) -> int:
        """Query rows of one block."""
        return ROWS * self.warpgroups

    def bytes(self, head_dim: int, value_dim: int, bias_bytes: int) -> int:
        """Shared memory, with elements of 2 bytes and so many for each logit of a tile of bias (or d_bias)."""
        biases = self.rows * self.keys * (self.stages + 1) * bias_bytes
        return (self.rows + self.keys) * (head_dim + value_dim) * 2 + biases


def bias_tiles(head_dim: int, value_dim: int, bias_bytes: int) -> BiasTiles:
    """The fastest tiles that fit in shared memory."""
    candidates = [BiasTiles(*size) for size in ((2, 128, 2), (2, 128, 1), (2, 64, 2), (2, 64, 1), (1, 64, 1))]
    sizes = head_dim, value_dim, bias_bytes
    fitting = [t for t in candidates if t.bytes(*sizes) <= SHARED_MEMORY]
    return _tuning.choose(Question("mosaic_gpu d_bias", sizes), fitting)


def key_value_stages(head_dim: int, value_dim: int, pair_bytes: int) -> int:
    """Tiles of 64 queries that the kernel of dK and dV has in shared memory together: 2 if they fit."""
    keys = ROWS * ((head_dim + value_dim) * 2 + 3 * ROWS * 2)
    stage = ROWS * ((head_dim + value_dim) * 2 + 8 + ROWS * pair_bytes)
    return 2 if keys + 2 * stage <= SHARED_MEMORY else 1
