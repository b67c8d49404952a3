"""The two halves of one attention call: `Spec`, what is known at trace time, and `Operands`, its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, Int32, UInt32

from jflash._semantics.dtypes import widened
from jflash._semantics.mask_mod import MaskMod
from jflash._semantics.score_mod import ScoreMod


@dataclasses.dataclass(frozen=True)
class Pages:
    """The layout of a paged cache in the arrays of a call."""

    size: int
    """The number of keys in a page."""
    dtype: np.dtype[Any]
    """The dtype of the cache: the query's, or one of 8 bits."""
    interleaved: bool
    """Whether one array has both: a row has, for each key head, the key and then the value."""
    scaled_by_page: bool = False
    """Whether `k_scale` or `v_scale` has a number for each page."""


class Operands(NamedTuple):
    """The arrays of one call in canonical form; `None` where the call does not use one.

    Batch axes are merged into one axis B, and every array has that axis in front, of size B or, where the call
    shares the array between the batch, of size 1 (`#B`). So folding a `vmap` axis into B, or sharding B over
    devices, is the same step for all of them.
    """

    query: Float[Array, "B T N H"]
    """The queries. In a call with `Spec.tokens` they are rows of one array, `[1, tokens, N, H]`."""
    key: Float[Array, "B S K H"]
    """The keys; for a paged call the rows of all pages, one after the other, `[#B, P * page_size, K, H]`. Where keys
    and values are interleaved, one array `[#B, P * page_size, K, 2 H]` is both `key` and `value`."""
    value: Float[Array, "B S K D"]
    bias: Float[Array, "#B #N #T #S"] | None = None
    mask: Bool[Array, "#B #N #T #S"] | None = None
    scale: Float[Array, "#B"] | None = None
    alibi_slopes: Float[Array, "#B N"] | None = None
    sinks: Float[Array, "#B N"] | None = None
    query_starts: Int32[Array, "B"] | None = None
    """The row of `query` that is an entry's first, in a call with `Spec.tokens`. Entries have rows of their own, by
    `query_lengths`, in order, and all rows are some entry's; one without rows starts where the next one does."""
    query_offset: Int32[Array, "#B"] | None = None
    """Any values, as lengths: they are read by `tile.in_range`."""
    query_lengths: Int32[Array, "#B"] | None = None
    key_lengths: Int32[Array, "#B"] | None = None
    query_segments: Int32[Array, "#B T"] | None = None
    key_segments: Int32[Array, "#B S"] | None = None
    batch_index: Int32[Array, "B"] | None = None
    """The batch entry of the whole call that a row of the arrays belongs to: it stays true when B is folded or
    sharded."""
    head_index: Int32[Array, "#B N"] | None = None
    """The head of the whole call that a head of the arrays is: it stays true when N is sharded."""
    first_query: Int32[Array, "#B"] | None = None
    """The index in its sequence of the first of these queries; `None` is 0.

    Only `score_mod`, `mask_mod` and dropout count from it. Offsets and lengths already count from these queries and
    keys.
    """
    first_key: Int32[Array, "#B"] | None = None
    """The index in its sequence of the first of these keys; `None` is 0.

    Only `score_mod`, `mask_mod` and dropout count from it.
    """
    dropout_seed: UInt32[Array, "B 2"] | None = None
    score_mod_arrays: tuple[Array, ...] = ()
    """The arrays that `score_mod` closes over, each `[#B, *its own shape]`."""
    mask_mod_arrays: tuple[Array, ...] = ()
    """The arrays that `mask_mod` closes over, each `[#B, *its own shape]`; they have no gradient."""
    coverage: Int8[Array, "#B #N I J"] | None = None
    """How much of each tile of the whole sequences `mask_mod` shows, and `score_mod` does not hide, as
    `Coverage.encoded`; `None`: not known."""
    page_table: Int32[Array, "#B pages"] | None = None
    """The page that holds each entry's next `Pages.size` keys; past its length, anything. In a call with
    `Spec.tokens` several entries may have the same row (`table_rows`)."""
    table_rows: Int32[Array, "B"] | None = None
    """The row of `page_table` that has an entry's pages, in a call with `Spec.tokens`."""
    k_scale: Float[Array, "#B #P #K"] | None = None
    """The factor of the keys of each page and key head, in the accumulator's dtype."""
    v_scale: Float[Array, "#B #P #K"] | None = None
    """The factor of the values of each page and key head, in the accumulator's dtype."""


class Results(NamedTuple):
    """The forward's results, which the tangent needs besides the operands and their tangents."""

    out: Float[Array, "B T N D"]
    lse: Float[Array, "B N T"]


class Residuals(NamedTuple):
    """The forward's results and their cotangents, which the backward needs besides the operands."""

    out: Float[Array, "B T N D"]
    lse: Float[Array, "B N T"]
    d_out: Float[Array, "B T N D"]
    d_lse: Float[Array, "B N T"]


HEADS_AXIS: dict[str, int] = {
    "query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "alibi_slopes": 1, "sinks": 1, "head_index": 1,
    "coverage": 1, "out": 2, "lse": 1, "d_out": 2, "d_lse": 1, "k_scale": 2, "v_scale": 2,
}  # fmt: skip
"""The heads' axis of each array that has one."""
QUERIES_AXIS: dict[str, int] = {
    "query": 1, "bias": 2, "mask": 2, "query_segments": 1, "out": 1, "lse": 2, "d_out": 1, "d_lse": 2,
}  # fmt: skip
"""The queries' axis of each array that has one."""
KEYS_AXIS: dict[str, int] = {"key": 1, "value": 1, "key_segments": 1}
"""The keys' axis of each array whose keys are split over devices. A bias or mask keeps all of its keys on every device,
which needs other ones at each step."""
ADDED_TO_LOGITS = frozenset({"alibi_slopes", "bias"})
"""The operands whose multiples are added to logits."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static facts of one call: hashable, equal when the same code serves both calls."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype[Any]
    bias_shape: tuple[int, int, int, int] | None
    bias_dtype: np.dtype[Any] | None
    mask_shape: tuple[int, int, int, int] | None
    operands: frozenset[str]
    """Names of the operands that the call has."""
    undifferentiated: frozenset[str] = frozenset()
    """Names of the operands whose gradient is not asked for; the backward may leave it out."""
    lse_has_cotangent: bool = False
    """Whether a backward's cotangent of the log-sum-exp may be other than 0."""
    scale: float | None = None
    """The scale; `None` if it is an operand."""
    query_offset: int | None = None
    """The offset; `None` if it is an operand."""
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    same_segments: bool = False
    """Whether queries and keys have the same segment ids: then a query has its own key's."""
    logits_soft_cap: float | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_rate: float = 0.0
    """The rate, as `dropout.possible_rate` rounds it."""
    broadcast_dropout: bool = False
    """Whether all batch entries and heads drop the same. For batch entries, the seeds alone decide."""
    precision: Any = None
    deterministic: bool = False
    sequence_axes: tuple[str, ...] = ()
    """The axes of a `shard_map` over which queries and keys are split: lengths here are those of one device."""
    sequence_strategy: str | None = None
    """The strategy that the caller names for split sequences; `None` takes the one with the least estimated time."""
    partial: bool = False
    """Whether there are keys or queries besides these.

    Then results are in the accumulator's dtype: outputs are to be merged by log-sum-exp, and gradients, those of
    parameters too, to be added up. A backward's residuals are those of all keys, with out and d_out in the query's
    dtype, and d_out is 0 for queries that see no key at all.
    """
    value_is_key: bool = False
    """Whether keys and values are one array, as in a latent cache: a kernel may read each row once."""
    pages: Pages | None = None
    """The layout of a paged cache; `None` where keys and values are arrays of the call's own."""
    tokens: int | None = None
    """The rows of one array of queries of which each entry of the batch has at most `query_length`; the output has as
    many. `None` where each entry has an array of its own."""

    @property
    def symbolic_size(self) -> Any:
        """The first of the sizes that `jax.export` leaves open, or `None`."""
        lengths = (self.batch, self.query_length, self.key_length)
        sizes = (*lengths, self.heads, self.key_heads, self.head_dim, self.value_dim)
        return next((size for size in sizes if jax.export.is_symbolic_dim(size)), None)

    @property
    def added(self) -> frozenset[str]:
        """The names of the call's operands whose multiples are added to logits."""
        return self.operands & ADDED_TO_LOGITS

    @property
    def group(self) -> int:
        """The number of query heads that share one key head."""
        return self.heads // self.key_heads

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of logits, softmax, sums and the log-sum-exp."""
        return widened(self.dtype)

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """The dtype of the output, and of the gradients of query, key and value."""
        return self.gradient_dtype(self.dtype)

    def gradient_dtype(self, dtype: Any) -> np.dtype[Any]:
        """Return the dtype of the gradient of an operand of `dtype`."""
        return widened(dtype, self.accumulator) if self.partial else np.dtype(dtype)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The pair (left, right): position p may see key j when p - left <= j <= p + right; `None` is unbounded."""
        left, right = self.window if self.window is not None else (None, None)
        if self.is_causal:
            right = 0
        return left, right

    def resized(self, operands: Operands) -> Spec:
        """Return the same call over a part of its batch and heads, or over a larger batch."""
        rows = None if self.tokens is None else self.query_length
        return dataclasses.replace(self, **shape_facts(operands, self.pages, rows))


def shape_facts(operands: Operands, pages: Pages | None, rows: int | None = None) -> dict[str, Any]:
    """Return the fields of `Spec` that the operands' shapes and dtypes determine.

    With `query_starts`, an entry has up to `rows` queries.
    """
    batch, query_length, heads, head_dim = operands.query.shape
    tokens = None
    if rows is not None:
        assert operands.query_starts is not None
        batch, query_length, tokens = len(operands.query_starts), rows, query_length
    _, key_length, key_heads, value_dim = operands.value.shape
    if pages is not None:
        assert operands.page_table is not None
        key_length = operands.page_table.shape[1] * pages.size
        value_dim -= head_dim if pages.interleaved else 0
    return dict(
        batch=batch,
        query_length=query_length,
        key_length=key_length,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=np.dtype(operands.query.dtype),
        bias_shape=None if operands.bias is None else operands.bias.shape,
        bias_dtype=None if operands.bias is None else np.dtype(operands.bias.dtype),
        mask_shape=None if operands.mask is None else operands.mask.shape,
        operands=frozenset(name for name, value in operands._asdict().items() if len(jax.tree.leaves(value)) > 0),
        tokens=tokens,
    )
