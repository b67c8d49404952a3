"""A paged cache as kernels read it: the rows of all its pages, one after the other, and which of them a tile needs.

Kernels read the cache where it lies: a padded or converted copy of it would take longer than attention does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile.inputs import KernelInputs, shared_index
from jflash._semantics.spec import Spec

TABLE = "page_table"
"""The page table's name among a kernel's arrays."""

SCALES = dict(key="k_scale", value="v_scale")
"""The names of what the keys, and values, of each page are multiplied by, among a kernel's arrays."""


def suits(spec: Spec, keys: int) -> bool:
    """Return whether a tile of `keys` keys is whole pages, or lies in one; without a paged cache any tile suits."""
    return spec.pages is None or keys % spec.pages.size == 0 or spec.pages.size % keys == 0


def parts(spec: Spec, keys: int) -> int:
    """Return how many pages a tile of `keys` keys has parts of, which suits the call; without a paged cache 1."""
    return 1 if spec.pages is None else max(1, keys // spec.pages.size)


def converts(spec: Spec) -> bool:
    """Return whether numbers of a call's paged cache are multiplied or rounded before products take them."""
    return spec.pages is not None and (spec.pages.dtype != spec.dtype or not spec.operands.isdisjoint(SCALES.values()))


def mends(spec: Spec) -> bool:
    """Return whether a kernel that copies tiles whole clears what lies behind the last key, when it has been copied.

    Otherwise tiles with padding come from a copy of the array's edge. When decoding that would be a large part of what
    is read, and a tile has to be mended seldom: at the end of a walk.
    """
    return spec.pages is not None or ("key_lengths" in spec.operands and spec.query_length <= WARPGROUP_ROWS)


def alignment(spec: Spec, keys: int) -> int:
    """Return a number that divides every tile's first key, so that its parts begin where pages do; 1 if any will do."""
    return 1 if spec.pages is None else min(keys, spec.pages.size)


def table_row(refs: Mapping[str, Ref], batch: Any) -> Any:
    """Return the row of the page table that has a batch entry's pages."""
    if "table_rows" in refs:
        return refs["table_rows"][batch]
    return shared_index(refs[TABLE], batch, None)[0]


class Part(NamedTuple):
    """Neighbouring keys of a tile that lie in one page, or in an array."""

    row: Int[Array, ""]
    """The row of the first one; the number of all rows if none of them is one of the entry's keys."""
    size: int


def parts_of_tile(inputs: KernelInputs, batch: Any, first: Any, keys: int, length: Any) -> list[Part]:
    """Return the parts of a tile of `keys` keys from `first` on, which `alignment` divides, in order.

    The entry has `length` keys. What the page table holds past them has no effect. Without pages there is one part.
    """
    pages, rows = inputs.spec.pages, inputs.refs["key"].shape[1]
    if pages is None:
        return [Part(jnp.where(first < length, first, rows), keys)]
    table = inputs.refs[TABLE]
    entry, last = table_row(inputs.refs, batch), table.shape[1] - 1
    number, count = lax.div(first, pages.size), parts(inputs.spec, keys)
    size = keys // count
    first_row = first - number * pages.size if count == 1 else 0

    def part(index: int) -> Part:
        page = table[entry, jnp.minimum(number + index, last)]
        is_inside = first + index * size < length
        return Part(jnp.where(is_inside, page * pages.size + first_row, rows), size)

    return list(map(part, range(count)))
