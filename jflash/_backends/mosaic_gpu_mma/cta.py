"""What the kernels' CTAs have in common: one warpgroup, or two, which copy for themselves and compute, and their
operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu_mma import copies, device_sums, paged_copies, products, warp_sums
from jflash._backends.mosaic_gpu_mma.paged_copies import CachedRows
from jflash._backends.mosaic_gpu_mma.products import Chosen, Operand, Tiles
from jflash._backends.mosaic_gpu_mma.tiles import Tile
from jflash._backends.nvidia import cache_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import KernelPlan, Refs, cta_index, grid_size
from jflash._backends.nvidia.ops import Ops, Ref
from jflash._backends.nvidia.packing import rows_of_head
from jflash._backends.nvidia.prepared import LENGTHS
from jflash._backends.nvidia.smem import WARPGROUP_ROWS, Buffers, round_up
from jflash._backends.nvidia.threads import coordinates
from jflash._backends.nvidia.threads.device_rows import ColumnChunk
from jflash._backends.nvidia.tile import operand_pieces
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord
from jflash._backends.nvidia.tile.operand_pieces import Pieces
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_range import Place, VisitedTile, Walk
from jflash._semantics.spec import Spec

STATISTICS = "lse", "delta"
"""What a backward knows of each query."""


class MmaOps(Ops):
    """What a warpgroup does where there is no `wgmma`: products and copies by the instructions that Ampere brought."""

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "64 columns"]:
        return coordinates.indices(shape, axis, first)

    add_product = staticmethod(products.add_product)
    load_rows = staticmethod(products.load_rows)
    sum_of_warps = staticmethod(warp_sums.sum_of_warps)
    scaled_pair = staticmethod(products.scaled_pair)

    copy_rows = staticmethod(copies.copy_rows)
    copy_cached_rows = staticmethod(paged_copies.copy_cached_rows)
    copy_page_numbers = staticmethod(paged_copies.copy_page_numbers)
    load_page_scales = staticmethod(paged_copies.load_page_scales)
    copy_numbers = staticmethod(copies.copy_numbers)
    commit = staticmethod(copies.commit)
    wait = staticmethod(copies.wait)
    store_tile = staticmethod(copies.store_tile)
    store_pair = staticmethod(copies.store_pair)

    add_rows = staticmethod(device_sums.add_rows)
    load_sums = staticmethod(device_sums.load_rows)


MMA = MmaOps()


def columns(dim: int) -> int:
    """Return the columns of a tile of rows of H or D numbers."""
    return round_up(dim, 16)


def buffer(spec: Spec, *shape: int) -> Any:
    """Return shared memory for tiles `[..., rows, columns]` of an operand, or `[..., pieces, rows, columns]`."""
    pieces = facts_of(spec).pieces
    return plgpu.SMEM((*shape[:-2], *[pieces] * (pieces > 1), *shape[-2:]), facts_of(spec).operand_dtype)


def buffers(spec: Spec, tile: Tile, rows: Sequence[str], visited: Sequence[str], **others: Any) -> Buffers:
    """Return shared memory for a CTA's rows and for what it visits, by the arrays' names, and for others."""
    dims = dict(query=spec.head_dim, key=spec.head_dim, value=spec.value_dim, d_out=spec.value_dim)
    of_rows = {name: buffer(spec, tile.rows, columns(dims[name])) for name in rows}
    rings = {name: buffer(spec, tile.stages, tile.size, columns(dims[name])) for name in visited}
    return Buffers(**of_rows, **rings, page_numbers=page_numbers(spec, tile), **others)


def page_numbers(spec: Spec, tile: Tile) -> Any:
    """Return shared memory for the numbers of the pages that have a visited tile's keys, for the tile that is visited
    and the two that come next; `None` without a paged cache."""
    if spec.pages is None:
        return None
    # What copies read ahead for rows that a tile of fewer keys does not have is here as well.
    size, keys = spec.pages.size, max(tile.size, WARPGROUP_ROWS)
    return plgpu.SMEM((3, pl.cdiv(keys + size - 1, size)), jnp.int32)


def copies_bias(spec: Spec) -> bool:
    """Return whether tiles of the bias come through shared memory, as those of operands do: numbers of 16 bits."""
    return facts_of(spec).bias_tile_bytes == 2


def bias_buffer(spec: Spec, *shape: int) -> Any:
    """Return shared memory for tiles `[..., rows, columns]` of the bias; `None` if they do not come through it."""
    if spec.bias_dtype is None or not copies_bias(spec):
        return None
    return plgpu.SMEM(shape, spec.bias_dtype)


def by_piece(blocks: Iterable[Pieces]) -> Operand:
    """Return an operand in registers from blocks of 64 rows in pieces: each of its pieces is of all blocks."""
    return tuple(zip(*blocks, strict=True))


def d_query_type(spec: Spec) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of dQ as kernels store it."""
    shape = spec.batch, spec.query_length, spec.heads, round_up(spec.head_dim, 8)
    return jax.ShapeDtypeStruct(shape, spec.result_dtype)


@dataclasses.dataclass(frozen=True)
class TiledPlan(KernelPlan):
    """A kernel with a tile, before any array."""

    tile: Tile


class Cta[Plan: TiledPlan]:
    """A warpgroup's view of its CTA and call."""

    def __init__(self, plan: Plan, refs: Refs, ops: MmaOps, **options: Any) -> None:
        """Take a kernel's references; `options` are those of `KernelInputs`."""
        self.plan, self.refs, self.smem, self.ops = plan, refs, refs.smem, ops
        self.inputs = KernelInputs(plan.spec, ops, refs.arrays, **options)
        self.warpgroups = plan.launch.warpgroups or 1
        self.key_limit: Any = None
        """The number of keys that an entry has in a paged cache."""

    def run(self) -> None:
        """Do what the warpgroup does."""
        raise NotImplementedError

    def blocks_from(self, first: Any) -> Iterator[Any]:
        """Return the CTA's rows, from `first` on, in slices of 64."""
        return (pl.ds(first + number * WARPGROUP_ROWS, WARPGROUP_ROWS) for number in range(self.plan.tile.blocks))

    def visited(self, place: Place) -> Walk:
        """Return the tiles that a block of the CTA's rows visits."""
        return tile_range.visited(self.inputs, place, self.plan.tile.rows, self.plan.tile.size)

    def slot(self, index: Any) -> Any:
        """Return where in shared memory the tile is that is visited after `index` others."""
        stages = self.plan.tile.stages
        return lax.rem(index, stages) if stages > 1 else 0

    def copy(self, name: str, batch: Any, head: Any, first: Any, target: Ref, chunk: ColumnChunk | None = None) -> None:
        """Begin to copy rows of an array, or a chunk of their columns, with zeros for padding: 0 * NaN is NaN."""
        array, packed = self.refs.arrays[name], self.inputs.packed_heads if name == "query" else 1
        source, length = rows_of_head(array.at[batch], head, packed), self.inputs.value(LENGTHS[name], batch)
        limit: Any = array.shape[1] * packed
        if length is not None:
            limit = jnp.minimum(length * packed, limit)
        self.ops.copy_rows(source, target, first, limit, chunk)

    def copy_cached(self, name: str, batch: Any, head: Any, first: Any, target: Ref, page_numbers: Ref) -> None:
        """Copy keys or values from a cache's pages, or begin to, with zeros past the length.

        `page_numbers` are those of the pages from that of row `first` on.
        """
        spec, pages, arrays = self.plan.spec, self.plan.spec.pages, self.refs.arrays
        assert pages is not None
        width = spec.head_dim if name == "key" else spec.value_dim
        column = spec.head_dim if pages.interleaved and name == "value" else 0
        own = lambda array, *others: array.at[(0 if array.shape[0] == 1 else batch, *others)]
        scales = arrays.get(cache_rows.SCALES[name])
        # What stays in 8 bits is scaled with the sums.
        if target.dtype.itemsize == 1:
            scales = None
        if scales is not None:
            scales = own(scales, slice(None), 0 if scales.shape[2] == 1 else head)
        cache = own(arrays[name], slice(None), head, pl.ds(column, width))
        rows = CachedRows(cache, page_numbers, pages.size, scales)
        self.ops.copy_cached_rows(rows, target, first, self.key_limit)

    def copy_bias(self, at: TileCoord, target: Ref) -> None:
        """Begin to copy a tile of the bias, `[queries, keys]`, with zeros past the array's ends."""
        source = self.inputs.part("bias", at.batch, at.head)
        # Tiles begin at multiples of 64.
        whole = round_up(source.shape[1], 64) + max(target.shape[1] - 64, 0)
        self.ops.copy_rows(source, target, at.query, source.shape[0], ColumnChunk(at.key, whole))

    def cta_rows(self, names: Sequence[str], batch: Any, head: Any, first: Any) -> list[Ref]:
        """Begin to copy the CTA's rows to shared memory, and return where they come to lie."""
        rows = [getattr(self.smem, name) for name in names]
        for name, target in zip(names, rows, strict=True):
            self.copy(name, batch, head, first, target)
        return rows

    def held(self, rows: Sequence[Ref]) -> list[Operand]:
        """Return the CTA's rows with the first ones in registers, when these have arrived, if the tile holds any."""
        held = self.plan.tile.held
        if held:
            self.ops.wait(warpgroups=self.warpgroups)
        return [*map(self.ops.load_rows, rows[:held]), *rows[held:]]

    def zeros(self, blocks: int, width: int) -> Tiles:
        """Return accumulators."""
        return tuple(self.ops.full((WARPGROUP_ROWS, width), 0) for _ in range(blocks))

    def product(self, a: Operand, b: Ref) -> Tiles:
        """Return a @ b.T, for the CTA's rows and a tile in shared memory."""
        return self.add_product(self.zeros(self.plan.tile.blocks, b.shape[-2]), a, b, transposed=True)

    def add_product(
        self, acc: Tiles, a: Operand, b: Ref, *, first_row: Any = None, paired: bool = False, **chosen: Any
    ) -> Tiles:
        """Return acc + a @ b of all pieces, for a tile in shared memory.

        `first_row` and `paired` are as for `products.add_product`, `chosen` the fields of `Chosen` but the order.
        """
        order = operand_pieces.order(facts_of(self.plan.spec).pieces)
        return self.ops.add_product(acc, a, b, Chosen(order, **chosen), first_row=first_row, paired=paired)

    def statistics(self, batch: Any, head: Any, rows: Any, axis: int) -> Iterator[Array]:
        """Load lse and delta of rows of queries, which are along an axis of tiles."""
        return (self.ops.load(self.refs.arrays[name].at[batch, head, rows], axis) for name in STATISTICS)

    def load(self, at: TileCoord, shape: tuple[int, int]) -> dict[str, Array]:
        """Load the packed mask and the bias of a tile, by name, if they have both axes, or the bias has that of keys;
        but no bias that comes through shared memory."""
        inputs = self.inputs
        loaded = inputs.load_packed_mask(at, shape) | ({} if inputs.keys_first else inputs.load_key_bias(at, shape))
        if facts_of(inputs.spec).has_bias_tiles and getattr(self.smem, "bias", None) is None:
            loaded["bias"] = self.load_bias(at, shape)
        return loaded

    def load_bias(self, at: TileCoord, shape: tuple[int, int]) -> Array:
        """Load a tile of a bias of both axes from device memory."""
        part = self.inputs.part("bias", at.batch, at.head)
        return self.ops.load_tile(part, at.query, at.key, shape, transposed=self.inputs.keys_first)


class QueriesCta[Plan: TiledPlan](Cta[Plan]):
    """A CTA that owns some rows of a head's queries, and walks over the tiles of keys that they see."""

    tiles: Walk
    """What the subclass visits."""

    def __init__(self, plan: Plan, refs: Refs, ops: MmaOps, **options: Any) -> None:
        super().__init__(plan, refs, ops, **options)
        self.batch, self.head = cta_index("batch"), cta_index("head")
        # Blocks that see most keys begin first, so that none of them is left at the end alone.
        self.block = grid_size("block") - 1 - cta_index("block")
        self.first_row = self.block * plan.tile.rows

    def places(self, tile: VisitedTile) -> list[TileCoord]:
        """Return where a tile of keys is, for each block of rows."""
        key = tile.start
        return [TileCoord(self.batch, self.head, rows.start, key) for rows in self.blocks_from(self.first_row)]

    @property
    def key_head(self) -> Any:
        """The head of keys and values that the rows attend to."""
        return lax.div(self.head, self.plan.spec.heads // self.inputs.packed_heads // self.plan.spec.key_heads)

    def copy_keys(self, index: Any, names: Sequence[str] = ("key", "value")) -> None:
        """Begin to copy a tile of keys and values, or one of both."""
        first, is_paged = self.tiles.start(index), self.plan.spec.pages is not None
        for name in names:
            target = getattr(self.smem, name).at[self.slot(index)]
            if is_paged:
                self.copy_cached(name, self.batch, self.key_head, first, target, self.page_numbers(index))
            else:
                self.copy(name, self.batch, self.key_head, first, target)
        if is_paged and "key" in names:
            self.copy_page_numbers(index + 1)

    def page_numbers(self, index: Any) -> Ref:
        """Return where in shared memory the numbers of the pages of a tile are."""
        buffer = self.smem.page_numbers
        return buffer.at[lax.rem(index, buffer.shape[0])]

    def copy_page_numbers(self, index: Any) -> None:
        """Begin to copy the numbers of the pages of a tile: they are read when the copies of its keys begin."""
        pages, table = self.plan.spec.pages, self.refs.arrays[cache_rows.TABLE]
        assert pages is not None
        # The numbers that are copied past the last tile are not read.
        first = lax.div(self.tiles.start(jnp.clip(index, 0, jnp.maximum(self.tiles.count - 1, 0))), pages.size)
        row = cache_rows.table_row(self.refs.arrays, self.batch)
        self.ops.copy_page_numbers(table.at[row], self.page_numbers(index), first)

    def copy_next(self, index: Any, names: Sequence[str] = ("key", "value")) -> None:
        """Begin to copy a tile of keys and values, or one of both, if there is such a tile."""
        pl.when(index < self.tiles.count)(lambda: self.copy_keys(index, names))
        self.ops.commit()
