"""Where a block of queries finds the keys it can see, and a block of keys the queries that can see it.

Known from the block's index and its batch entry's offset and lengths; with segments from a small table, made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jflash._backends.mosaic_gpu import pairs as bias_and_mask
from jflash._backends.mosaic_gpu.inputs import Inputs
from jflash._semantics import visibility
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.visibility import Spans

LIMITS = frozenset({"query_lengths", "key_lengths", "query_segments"})
"""Operands that say what is seen: before the call nobody knows."""


def beginning(block: Any, size: int, missing: int = 0) -> Any:
    """Where a block of `size` begins, if the first one has so many less."""
    return jnp.maximum(block * size - missing, 0) if missing else block * size


def table(
    spec: Spec, operands: Operands, size: int, missing: int = 0, *, of_keys: bool = False
) -> Int[Array, "B blocks 4"] | None:
    """The spans of every block of `size` queries (or, `of_keys`, keys); `None` where a kernel finds them itself."""
    if "query_segments" not in spec.operands:
        return None
    find, length = _find(of_keys), spec.key_length if of_keys else spec.query_length
    unmasked = operands._replace(mask=None)
    one = lambda batch, block: jnp.stack(
        find(spec, unmasked, batch, 1, beginning(block, size, missing), min(size, length))
    )
    every = jax.vmap(jax.vmap(one, (None, 0)), (0, None))
    return every(jnp.arange(spec.batch), jnp.arange(-(-length // size)))


def _find(of_keys: bool) -> Callable[..., Spans]:
    return visibility.query_spans if of_keys else visibility.key_spans


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles that a block visits, of `size` each, from `first` on.

    In those outside [whole_start, whole_stop) not everybody sees everything, apart from what a dense mask says; `None`
    if there is none such.
    """

    first: Int[Array, ""]
    count: Int[Array, ""]
    whole: tuple[Int[Array, ""], Int[Array, ""]] | None
    size: int

    def start(self, index: Int[Array, ""] | int) -> Int[Array, ""]:
        """The first key (or query) of the tile that is visited after `index` others."""
        return self.first + index * self.size

    def masked[Values](self, index: Int[Array, ""], values: Values, mask: Callable[[Values], Values]) -> Values:
        """`mask(values)` for a tile that needs it, `values` for others."""
        is_partial = self.is_partial(index)
        return values if is_partial is None else lax.cond(is_partial, mask, lambda values: values, values)

    def is_partial(self, index: Int[Array, ""]) -> Bool[Array, ""] | None:
        """Whether a tile needs a mask; `None` if none does."""
        if self.whole is None:
            return None
        start = self.start(index)
        return (start < self.whole[0]) | (start + self.size > self.whole[1])

    def part(self, index: Int[Array, ""], parts: int) -> Walk:
        """The tiles that fall to one of several blocks that share the walk; at least one, which may be past the end."""
        if parts == 1:
            return dataclasses.replace(self, count=jnp.maximum(self.count, 1))
        stop = self.first + self.count * self.size
        each = lax.div(self.count + parts - 1, parts)
        first = jnp.minimum(self.first + index * each * self.size, stop)
        count = jnp.maximum(jnp.minimum(self.count - index * each, each), 1)
        whole = self.whole if self.whole is not None else (self.first, stop)
        return dataclasses.replace(self, first=first, count=count, whole=whole)


def _spans(call: Inputs, batch: Any, first: Any, rows: int, *, of_keys: bool) -> Spans:
    """The spans of some rows of queries (or, `of_keys`, keys) in a call without segments."""
    limits: Any = {name: call.value(name, batch) for name in ("query_offset", "query_lengths", "key_lengths")}
    nothing: Any = Operands(query=None, key=None, value=None, **limits)  # pyright: ignore[reportArgumentType]
    return _find(of_keys)(call.spec, nothing, 0, 1, first, rows)


def walk_keys(call: Inputs, batch: Any, block: Any, rows: int, size: int, missing: int = 0) -> Walk:
    """The tiles of keys that a block of `rows` queries visits, of which the first one has so many less."""
    rows, missing = max(rows // call.packed, 1), missing // call.packed
    return _walk(call, batch, block, beginning(block, rows, missing), rows, size, of_keys=False)


def own_keys(call: Inputs, walk: Walk, batch: Any, row: Any, rows: int) -> tuple[Any, Any, Walk]:
    """Of a block's walk over keys, from where to where some of its rows see any, at least one tile; and the walk with
    what is whole for them. All of it where that is not known beforehand."""
    spec = call.spec
    if "spans" in call.refs or call.packed > 1:
        return 0, walk.count, walk
    found = _spans(call, batch, row, rows, of_keys=False)
    seen_stop = jnp.where(row < spec.query_length, found.stop, found.start)
    start = jnp.clip(lax.div(found.start - walk.first, walk.size), 0, walk.count - 1)
    stop = jnp.clip(lax.div(seen_stop - walk.first + walk.size - 1, walk.size), start + 1, walk.count)
    whole = None if walk.whole is None else (found.full_start, jnp.minimum(found.full_stop, walk.whole[1]))
    return start, stop, dataclasses.replace(walk, whole=whole)


def walk_queries(call: Inputs, batch: Any, block: Any, keys: int, size: int) -> Walk:
    """The tiles of queries that a block of keys visits."""
    return _walk(call, batch, block, block * keys, keys, size, of_keys=True)


def _walk(call: Inputs, batch: Any, block: Any, row: Any, rows: int, size: int, *, of_keys: bool) -> Walk:
    spec = call.spec
    known = call.refs.get("spans")
    if known is not None:
        found = Spans(*(known[batch, block, part] for part in range(4)))
    else:
        found = _spans(call, batch, row, rows, of_keys=of_keys)
    alignment = 64 if bias_and_mask.has_tiles(spec) or bias_and_mask.has_words(spec) else 8
    first = lax.div(found.start, alignment) * alignment
    count = jnp.where(found.start < found.stop, lax.div(found.stop - first + size - 1, size), 0)
    whole = found.full_start, found.full_stop
    ragged = spec.key_length % (rows if of_keys else size) != 0
    if ragged and of_keys:
        # What is read as keys past the end is 0, and would have weights.
        whole = whole[0], jnp.where(row + rows > spec.key_length, first, whole[1])
    limited = spec.bounds != (None, None) or not LIMITS.isdisjoint(spec.operands)
    return Walk(first, count, whole if ragged or limited else None, size)
