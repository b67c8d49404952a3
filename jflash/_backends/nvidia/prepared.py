"""A call's arrays in the forms that kernels take, each made once, when the first kernel asks for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash._backends.nvidia import hidden_rows, prepare
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.pack_mask import pack_mask
from jflash._backends.nvidia.tile import base2, mask_mod_reads, score_mod_reads
from jflash._backends.nvidia.walk import tile_list, tile_range, work_items
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import Shares
from jflash._semantics.spec import Operands, Residuals, Spec

PerQuery = Float[Array, "B N L"]
"""One number for each query, and room for a tile that begins at the last one."""


class Prepared:
    """What forward and backward kernels read besides queries, keys, values and their cotangents."""

    def __init__(self, spec: Spec, operands: Operands, ops: Ops) -> None:
        self.spec, self.operands, self.ops = spec, operands, ops
        self._masks: dict[bool, dict[str, Array]] = {}
        self._visits: dict[Blocks, dict[str, Array]] = {}
        self._work: dict[tuple[Blocks, Shares], dict[str, Array]] = {}

    @functools.cached_property
    def others(self) -> dict[str, Array]:
        """The operands but query, key, value and a packed mask, by name."""
        return prepare.operands_for_kernels(self.spec, self.operands) | self.function_arrays

    @property
    def function_arrays(self) -> dict[str, Array]:
        """What a score_mod and a mask_mod read, by name."""
        of_score_mod = score_mod_reads.prepare(self.operands.score_mod_arrays)
        return of_score_mod | mask_mod_reads.prepare(self.operands.mask_mod_arrays)

    def packed_mask(self, *, keys_first: bool = False) -> dict[str, Int[Array, "#B #N row_tiles column_tiles 128"]]:
        """Return a mask of both axes, packed for tiles whose rows are queries or, `keys_first`, keys, by name."""
        if self.operands.mask is None or not facts_of(self.spec).has_packed_mask:
            return {}
        if keys_first not in self._masks:
            self._masks[keys_first] = {"mask": pack_mask(self.operands.mask, self.ops, keys_first=keys_first)}
        return self._masks[keys_first]

    def ranges(self, size: int, missing: int = 0, *, of_keys: bool = False) -> dict[str, Int[Array, "B blocks 4"]]:
        """Return `tile_range.table` of blocks of `size` queries or, `of_keys`, keys, by name."""
        return tile_range.table(self.spec, self.operands, size, missing, of_keys=of_keys)

    def visits(self, blocks: Blocks) -> dict[str, Array]:
        """Return what says which tiles each block visits, by name: lists, or ranges."""
        if blocks not in self._visits:
            ranges = lambda: self.ranges(blocks.rows, blocks.missing, of_keys=blocks.of_keys)
            self._visits[blocks] = tile_list.lists(self.spec, self.operands, blocks) or ranges()
        return self._visits[blocks]

    def work(self, name: str, blocks: Blocks, shares: Shares | None) -> dict[str, Array]:
        """Return the list of items, or of cut walks, by name; nothing if no shares are dealt out."""
        if shares is None:
            return {}
        if (blocks, shares) not in self._work:
            self._work[blocks, shares] = work_items.deal(self.spec, self.operands, blocks, shares)
        return {name: self._work[blocks, shares][name]}


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
        return dict(lse=for_exponent(self.spec, self.lse), delta=prepare.with_margin(self.delta, (2,)))

    def run(self, kernels: Sequence[Kernel[Any]]) -> dict[str, Array]:
        """Run kernels one after the other, and return all their results by name."""
        for kernel in kernels:
            self.made |= kernel.run(self)
        return self.made


def for_exponent(spec: Spec, lse: Float[Array, "B N T"]) -> PerQuery:
    """Return the log-sum-exp in the units of the call's exponent, with a margin of +inf."""
    exact = base2.of(spec).exact
    return prepare.with_margin(lse if exact else lse * base2.LOG2_E, (2,), jnp.inf)
