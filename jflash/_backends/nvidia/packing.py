"""Query heads that share keys as rows of one tile, where there are few queries, as when decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.ops import Ops, Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile.inputs import shared_index
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.work_items import Division, Shares, Work
from jflash._semantics.spec import Operands, Spec

_MOST_QUERIES = 16
"""Queries up to which heads that share keys are packed into the rows of one tile."""

SINKS_OF_ROWS = "sinks_of_rows"
"""The name of packed heads' sinks among a kernel's arrays: each row's, for a tile that begins with any head."""

_OF_TOKENS = "query_starts", "query_lengths"
"""The operands that say which rows of an array of tokens an entry has."""

_MOST_PAGED_QUERIES = 64
"""Queries up to which heads are packed where keys are in pages: a ragged batch has blocks of one query, and of 64."""


def packs(spec: Spec) -> bool:
    """Whether heads that share keys go into the rows of one tile, whose blocks have to end where a query's heads do."""
    ends_with_block = spec.query_length * spec.group <= 2 * WARPGROUP_ROWS or WARPGROUP_ROWS % spec.group == 0
    return may_pack(spec) and ends_with_block


def may_pack(spec: Spec) -> bool:
    """Whether heads that share keys may be rows of one tile: few queries, and logits alike for each."""
    alike = {"bias", "mask", "alibi_slopes", "query_segments"}.isdisjoint(spec.operands)
    few = spec.query_length <= (_MOST_QUERIES if spec.pages is None else _MOST_PAGED_QUERIES)
    return alike and spec.score_mod is None and spec.dropout_rate == 0 and few and spec.group > 1


def rows_of_head(array: Ref, head: Any, packed_heads: int) -> Ref:
    """Return `[L, D]` of one head of an array `[L, N, D]`; of packed heads `[L, heads, D]`, whose rows follow one
    another, or of a single query `[heads, D]`."""
    if packed_heads == 1:
        return array.at[:, head]
    heads = pl.ds(head * packed_heads, packed_heads)
    return array.at[0, heads] if array.shape[0] == 1 else array.at[:, heads]


@dataclasses.dataclass(frozen=True)
class EntryRows:
    """The rows of a head that an entry has of queries or of the output, in device memory."""

    ref: Ref
    first: Any = None
    """The entry's first row; `None`: all rows are its own."""
    stop: Any = None

    def span(self, first: Any, stop: Any) -> tuple[Any, Any]:
        """Return where the entry's rows from `first` to below `stop` are, but for those that it has not."""
        if self.first is None:
            return first, stop
        return self.first + first, jnp.minimum(self.first + stop, self.stop)


class ForwardShape:
    """The rows and heads of a forward whose plan has these fields."""

    spec: Spec
    tile: Any
    packed_heads: int
    division: Division

    @property
    def missing_rows(self) -> int:
        """Rows that the first block of queries lacks."""
        return 0

    @property
    def visits(self) -> Blocks:
        """What each block of queries visits."""
        raise NotImplementedError

    @property
    def results(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Output and log-sum-exp in device memory, by name, with room for whole blocks of rows."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows of queries of a head."""
        return self.spec.query_length * self.packed_heads

    @property
    def heads(self) -> int:
        """Heads of the rows."""
        return self.spec.heads // self.packed_heads

    @property
    def shares(self) -> Shares | None:
        """How items of work are dealt out; `None` where the grid counts batch entries and blocks."""
        return self.division if isinstance(self.division, Shares) else None

    def sinks(self, operands: Operands) -> dict[str, Float[Array, "#B heads rows"]]:
        """Return the sinks of packed heads, by name."""
        if operands.sinks is None or self.packed_heads == 1:
            return {}
        each = operands.sinks.reshape(-1, self.heads, self.packed_heads)
        return {SINKS_OF_ROWS: jnp.tile(each, (1, 1, 1 + pl.cdiv(WARPGROUP_ROWS, self.packed_heads)))}

    def sink(
        self, arrays: Mapping[str, Ref], ops: Ops, batch: Any, head: Any, first: Any, work: Work | None = None
    ) -> Array | None:
        """Return a head's sink, or of packed heads that of each row from `first` on; `None` if none counts in what is
        done of a walk."""
        if "sinks" not in arrays:
            return None
        if self.packed_heads == 1:
            sink = arrays["sinks"][shared_index(arrays["sinks"], batch, head)]
        else:
            of_head = arrays[SINKS_OF_ROWS].at[shared_index(arrays[SINKS_OF_ROWS], batch, head)]
            sink = ops.load(of_head.at[pl.ds(lax.rem(first, self.packed_heads), WARPGROUP_ROWS)], 0)
        return sink if work is None else work.sink(sink)

    @property
    def parts(self) -> str:
        """How rows and keys are divided, in words for `explain`."""
        return f"{self.packed_heads} heads packed, {self.division}"

    @property
    def out_rows(self) -> tuple[int, int]:
        """Batch entries and queries of the output in device memory."""
        spec = self.spec
        return (spec.batch, spec.query_length) if spec.tokens is None else (1, spec.tokens)

    def rows_of(self, array: Ref, arrays: Mapping[str, Ref], batch: Any, head: Any) -> EntryRows:
        """Return the rows of a head of a batch entry's queries or output, `[B, L, N, D]`, as `rows_of_head` does.

        `arrays` are the kernel's, by name; `of_tokens` are among them.
        """
        if self.spec.tokens is None:
            return EntryRows(rows_of_head(array.at[batch], head, self.packed_heads))
        heads = array.at[0, :, pl.ds(head * self.packed_heads, self.packed_heads)]
        start, count = (arrays[name][batch] * self.packed_heads for name in _OF_TOKENS)
        return EntryRows(heads, start, start + count)

    def of_tokens(self, operands: Operands) -> dict[str, Array]:
        """Return the arrays that say which rows an entry has, by name, if all entries have theirs in one array."""
        return {} if self.spec.tokens is None else {name: getattr(operands, name) for name in _OF_TOKENS}

    def rows_of_block(self, block: Any) -> tuple[Any, Any]:
        """Return a block's first row, and where its rows end."""
        rows, missing = self.tile.rows, self.missing_rows
        stop = jnp.minimum((block + 1) * rows - missing, self.rows)
        return tile_range.block_start(block, rows, missing), stop
