"""A call's arrays in the forms that kernels take: padded to whole tiles, with margins, and with heads packed.

`Prepared` makes each of them once, when the first kernel asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia import cache_rows, deal, hidden_rows
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.pack_mask import pack_mask
from jflash._backends.nvidia.tile import program_reads, softmax
from jflash._backends.nvidia.walk import tile_list, tile_range, work_items
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import Shares
from jflash._semantics import visits
from jflash._semantics.coverage import Coverage
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash._semantics.tile import PARAMETERS

MARGIN = 256
"""Elements past the end of a vector that a tile at its end may read."""

LENGTHS = {
    **dict.fromkeys(("query", "t_query", "d_out"), "query_lengths"),
    **dict.fromkeys(("key", "t_key", "value", "t_value"), "key_lengths"),
}
"""The lengths that say where an array's padding begins, by the array's name."""

PerQuery = Float[Array, "B N L"]
"""One number for each query, and room for a tile that begins at the last one."""


def with_margin(array: Array, axes: tuple[int, ...], fill: float = 0) -> Array:
    """Return `array` with room along `axes` for a tile that begins at the last element."""
    widths = [(0, MARGIN + -size % 8 if axis in axes else 0) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths, constant_values=fill)


def operands_for_kernels(spec: Spec, operands: Operands, *, except_bias: bool = False) -> dict[str, Array]:
    """Return the operands but query, key, value and a packed mask, as kernels take them, by name; or their tangents.

    A bias or mask of one axis becomes a float32 vector with a margin. With `except_bias` the bias is left out.
    """
    prepared: dict[str, Array] = {}
    scalars = *PARAMETERS, "sinks", "query_offset", "query_starts", "query_lengths", "key_lengths"
    of_pages = "page_table", "table_rows", *cache_rows.SCALES.values()
    counted = spec.score_mod is not None or spec.mask_mod is not None or spec.dropout_rate > 0
    indices = ("batch_index", "head_index", "first_query", "first_key") if counted else ()
    segments = "query_segments", "key_segments"
    for name in (*scalars, *of_pages, *indices, *segments):
        array = getattr(operands, name)
        if array is not None and name != "bias":
            prepared[name] = with_margin(array, (1,)) if name in segments else array
    for name, kind in facts_of(spec).kinds.items():
        array = getattr(operands, name)
        if array is None or (name == "bias" and except_bias) or (name == "mask" and kind == "tile"):
            continue
        match kind:
            case "tile":
                array = jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % 8), (0, -array.shape[3] % 64)))
            case "row" | "column":
                vector = array.squeeze(3 if kind == "row" else 2)
                array = with_margin(vector.astype(jnp.float32), (2,))
            case "scalar":
                array = array[..., 0, 0].astype(jnp.float32)
        prepared[name] = array
    if operands.dropout_seed is not None:
        prepared["dropout_seed"] = operands.dropout_seed
    prepared |= program_reads.prepare("score_mod", operands.score_mod_arrays)
    return prepared | program_reads.prepare("mask_mod", operands.mask_mod_arrays)


def in_32_bits[**Arguments, Made](function: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Return `function`, traced where Python's numbers have 32 bits, as those of kernels have.

    With `jax_enable_x64` they have 64, and make of an int32 that they meet an int64.
    """

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return traced


class Prepared:
    """What forward and backward kernels read besides queries, keys, values and their cotangents."""

    def __init__(self, spec: Spec, operands: Operands, ops: Ops) -> None:
        self.spec, self.operands, self.ops = spec, operands, ops
        self._made: dict[Hashable, dict[str, Array]] = {}

    @functools.cached_property
    def others(self) -> dict[str, Array]:
        """The operands but query, key, value and a packed mask, by name."""
        return operands_for_kernels(self.spec, self.operands)

    def packed_mask(self, *, keys_first: bool = False) -> dict[str, Int[Array, "#B #N row_tiles column_tiles 128"]]:
        """Return a mask of both axes, packed for tiles whose rows are queries or, `keys_first`, keys, by name."""
        if self.operands.mask is None or not facts_of(self.spec).has_packed_mask:
            return {}
        mask = self.operands.mask
        return self._once(keys_first, lambda: {"mask": pack_mask(mask, self.ops, keys_first=keys_first)})

    def visits(self, blocks: Blocks) -> dict[str, Array]:
        """Return what says which tiles each block visits, by name: lists, or ranges."""

        def make() -> dict[str, Array]:
            if (found := self._coverage(blocks)) is None:
                return tile_range.table(self.spec, self.operands, blocks)
            return {tile_list.LISTS: visits.listed(found, spare=1)}

        return self._once(blocks, make)

    def kinds(self, blocks: Blocks) -> dict[str, Array]:
        """Return what says of every tile whether a block of queries sees it, by name."""
        if (found := self._coverage(blocks)) is None:
            return tile_range.table(self.spec, self.operands, blocks)
        return {tile_list.KINDS: found.encoded().astype(jnp.int32)}

    def _once(self, key: Hashable, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
        """Return arrays that several kernels read: what `make` returned when the first of them asked."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _coverage(self, blocks: Blocks) -> Coverage | None:
        words = self.packed_mask(keys_first=blocks.of_keys).get("mask")
        return tile_list.coverage(self.spec, self.operands, blocks, words)

    def work(self, blocks: Blocks, shares: Shares | None) -> dict[str, Array]:
        """Return the list of items of work, by name; nothing if no shares are dealt out."""
        if shares is None:
            return {}
        make = lambda: {work_items.ITEMS: deal.deal(self.spec, self.operands, blocks, shares, self.ops)}
        return self._once((blocks, shares), make)


class PreparedBackward(Prepared):
    """What backward kernels read."""

    def __init__(self, spec: Spec, operands: Operands, residuals: Residuals, ops: Ops) -> None:
        super().__init__(spec, operands, ops)
        d_out = hidden_rows.zeroed(spec, residuals, ops)
        self.residuals, self.made = residuals._replace(d_out=d_out), dict[str, Array]()
        self.factors = dict(query=operands.query, key=operands.key, value=operands.value, d_out=d_out)
        """The arrays of the call whose tiles are multiplied."""
        self.lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
        """The log-sum-exp `[B, N, T]`, +inf where a query sees nothing."""

    @functools.cached_property
    def delta(self) -> Float[Array, "B N T"]:
        """What the softmax takes from every dP of a row, sum(dO * O) - d_lse; 0 where a query sees nothing."""
        raise NotImplementedError

    @functools.cached_property
    def rows(self) -> dict[str, PerQuery]:
        """The row statistics of kernels that subtract them after the products, by name."""
        return dict(lse=for_exponent(self.spec, self.lse), delta=with_margin(self.delta, (2,)))

    def run(self, kernels: Sequence[Kernel[Any]]) -> dict[str, Array]:
        """Run kernels one after the other, and return all their results by name."""
        for kernel in kernels:
            self.made |= kernel.run(self)
        return self.made


def for_exponent(spec: Spec, lse: Float[Array, "B N T"]) -> PerQuery:
    """Return the log-sum-exp in the units of the call's exponent, with a margin of +inf."""
    exact = softmax.exponent(spec).exact
    return with_margin(lse if exact else lse * softmax.LOG2_E, (2,), jnp.inf)
