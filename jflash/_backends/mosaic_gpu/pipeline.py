"""What warpgroups that copy and warpgroups that compute agree on: registers, free slots, loops over copies, and the
tiles that are copied, by the tensor memory accelerator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu.array_shapes import edge_row
from jflash._backends.mosaic_gpu.panels import Panels
from jflash._backends.nvidia.launch import cta_index
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.prepared import LENGTHS
from jflash._backends.nvidia.tile.inputs import KernelInputs

_WARPS = 4
"""Warps of a warpgroup."""


def split_registers(warpgroups: int, *, copies: bool, mends: bool = False, converts: bool = False) -> None:
    """Give the registers of the warpgroup that copies to the `warpgroups` that compute; called once by each.

    Together they are what a CTA has at first, as many for each as its threads leave in multiples of 8 of 512: 168 for
    three warpgroups, 128 for four, 96 for five. A request for more would wait forever. The one that copies has more if
    it `mends` tiles. Where it `converts` what it copies there are two, and two at most that compute.
    """
    if converts:
        compute, copy = {1: (232, 136), 2: (200, 56)}[warpgroups]
        set_registers(copy if copies else compute, warpgroups + 2)
        return
    if warpgroups == 1:
        return
    compute, copy = {2: (224, 56) if mends else (240, 24), 3: (160, 32), 4: (112, 32)}[warpgroups]
    set_registers(copy if copies else compute, warpgroups + 1)


def set_registers(count: int, warpgroups: int) -> None:
    """Give each thread of this warpgroup `count` registers; those of all `warpgroups` add up to 512 at most."""
    at_first = 512 // warpgroups // 8 * 8
    plgpu.set_max_registers(count, action="increase" if count > at_first else "decrease")


def release(*empty: Any) -> None:
    """Say that every slot of a ring is empty, at first; called once by each warpgroup that will read it.

    So the first copies wait as all others do.
    """
    for barrier in _slots(empty):
        plgpu.barrier_arrive(barrier)


def drain(*empty: Any) -> None:
    """Wait until the last tiles have been read: a barrier may not end in the middle of its phase."""
    for barrier in _slots(empty):
        plgpu.barrier_wait(barrier)


def _slots(rings: Iterable[Any]) -> Iterable[Any]:
    return (barriers.at[slot] for barriers in rings for slot in range(barriers.shape[0]))


def copy_in(source: Any, tile: Any, full: Any, cluster: str | None = None) -> None:
    """Issue copies to shared memory of what is in device memory; of an equal share for all CTAs along `cluster`."""
    for panel, columns in _copied(tile, source):
        plgpu.copy_gmem_to_smem(columns, panel, full, collective_axes=cluster)


def chunks_of_columns(tile: Any, width: int = 64) -> Iterable[Any]:
    """Yield a tile's columns in chunks of at most `width`, which are whole swizzles."""
    if isinstance(tile, Panels):
        yield from tile.of_products()
        return
    columns = tile.shape[-1]
    width = math.gcd(columns, width)
    for first in range(0, columns, width):
        yield tile.at[:, pl.ds(first, width)]


def copy_out(tile: Any, target: Any) -> None:
    """Issue copies of shared memory to device memory."""
    for panel, columns in _copied(tile, target):
        plgpu.copy_smem_to_gmem(panel, columns)


def _copied(tile: Any, array: Any) -> Iterable[tuple[Any, Any]]:
    return tile.of_copies(array) if isinstance(tile, Panels) else [(tile, array)]


def store(values: Any, staged: Any, target: Any) -> None:
    """Copy values to device memory, in the dtype of the shared memory `staged` that they go through."""
    staged[...] = values.astype(staged.dtype)
    plgpu.commit_smem()
    copy_out(staged, target)


def columns(width: int, array: Any, number: Any, first: int = 0) -> Any:
    """Return `width` columns, from `first` on, of an array in device memory; of what it lacks a copy reads 0.

    A slice past the end must begin at an index that is not static: a `number`, times 0.
    """
    return pl.ds(first if first + width <= array.shape[-1] else number * 0 + first, width)


def opaque_zero(step: Any, warpgroup: Any) -> Any:
    """Return the index of a tile that stays in place throughout a loop over `step`: 0, but not to the compiler.

    What it is for `Ops.opaque_zero` says, which is for loops of which the compiler knows the warpgroup or the steps.
    """
    return lax.shift_right_logical(step + warpgroup, 30)


def slot(step: Any, stages: int, opaque_index: Any) -> Any:
    """Return the slot of a ring of `stages` that a step's tile lies in; the step's `opaque_zero` if there is one."""
    return lax.rem(step, stages) if stages > 1 else opaque_index


def opaque(count: Any, *axes: str) -> Any:
    """Return `count` such that the compiler cannot know it, as it does not know the indices of the grid's `axes`.

    It would unroll some of a loop's copies. From that, ptxas (CUDA 13.5) once made a copy from a wrong place: it took
    a coordinate that is 0 from a register that still held an address. Naming more axes makes d256 spill less.
    """
    number = sum(map(cta_index, axes))
    return count + lax.bitwise_and(number * (number + 1), 1)


def each_by_warps(copy: Callable[[int], None], number: int) -> None:
    """Call `copy(index)` for `number` indices; four warps issue many copies sooner than one.

    What that bought: examples/benchmarks/experiments/2026-11-29-decoding.md.
    """
    if number <= _WARPS:
        _each_of(copy, range(number))
        return

    def issue(warp: Any) -> None:
        for first in range(_WARPS):
            pl.when(warp == first)(functools.partial(_each_of, copy, range(first, number, _WARPS)))

    plgpu.warp_map(issue)


def _each_of(copy: Callable[[int], None], indices: Iterable[int]) -> None:
    for index in indices:
        copy(index)


def for_each_copy(count: Any, copy: Callable[[Any], None], *axes: str) -> None:
    """Call `copy(index)` for `count` tiles; `axes` are as for `opaque`."""
    lax.fori_loop(0, opaque(count, *axes), lambda index, _: copy(index), None)


class GmemTile(NamedTuple):
    """A tile of an array `[B, L, N, H]` in device memory."""

    batch: Int[Array, ""]
    first: Int[Array, ""]
    size: int
    head: Int[Array, ""]

    def of(self, ref: Ref, width: int, first_column: int = 0) -> Ref:
        """The tile's part of the array, in columns that fill a buffer of this width."""
        own = columns(width, ref, self.batch, first_column)
        return ref.at[self.batch, pl.ds(self.first, self.size), self.head, own]


class TmaInputs(KernelInputs):
    """`KernelInputs` whose tiles are copied with zeros for padding."""

    def copy_rows(
        self, name: str, source: GmemTile, target: Ref, full: Ref, first_column: int = 0, cluster: str | None = None
    ) -> None:
        """Copy a tile of queries, keys, values or d_out to shared memory, with zeros for padding: 0 * NaN is NaN.
        `cluster` is as for `copy_in`.

        A tile in which padding begins comes from the array's edge, past whose end copies read zeros.
        """
        edge = self.refs.get(f"{name}_edge")
        copy = lambda ref, tile: copy_in(tile.of(ref, target.shape[-1], first_column), target, full, cluster)
        if edge is None:
            copy(self.refs[name], source)
            return
        length: Any = self.value(LENGTHS[name], source.batch)
        inside = source.first + source.size <= length
        pl.when(inside)(lambda: copy(self.refs[name], source))
        pl.when(~inside)(lambda: copy(edge, source._replace(first=source.first - edge_row(length))))
