"""The arguments of a call whose keys and values are in the pages of a cache: their checks and their canonical form."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash import _arguments
from jflash._semantics.spec import Pages

NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""What a cache may hold besides the query's dtype. The 16-bit dtypes of queries have all of their numbers."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """The arguments of `attention` that hold keys and values, as they are given."""

    key: Any
    value: Any
    page_table: Any = None
    k_scale: Any = None
    v_scale: Any = None

    @property
    def places(self) -> int:
        """How many keys an entry's row of the page table has room for."""
        return self.page_table.shape[-1] * self.key.shape[1]

    def check(self, query: Any, key_value_seq_lengths: Any, sequence_axis: Any) -> Pages | None:
        """How the pages lie; `None` if there are none.

        Raises:
          ValueError, TypeError: as `attention`.
        """
        if self.page_table is None:
            for name in ("k_scale", "v_scale"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` belongs to a paged cache. Got it without `page_table`.")
            _arguments.query_key_value(query, self.key, self.value)
            return None
        _arguments.heads("query", query, "T, N, H")
        pages = check_pages(self.key, self.value, query.dtype, query.shape[-1])
        key_heads = heads_of(self.key, pages)
        if query.shape[-2] % key_heads != 0:
            raise ValueError(
                f"`query` heads must be a multiple of `key` heads. Got N={query.shape[-2]} and K={key_heads}."
            )
        _arguments.integers("page_table", self.page_table)
        batch_axes = query.shape[:-3]
        if self.page_table.shape[:-1] != batch_axes or self.page_table.ndim == 0:
            raise ValueError(
                f"`page_table` must have the shape (*B, pages), with the query's batch axes {batch_axes}: the pages of "
                f"each entry's keys, in order. Got {self.page_table.shape}."
            )
        if key_value_seq_lengths is None:
            raise ValueError(
                "`key_value_seq_lengths` must be given with `page_table`: how many keys each entry has in its pages. "
                "Got None."
            )
        if sequence_axis is not None:
            raise ValueError(
                f"`sequence_axis` splits keys over devices, and each needs a paged cache whole. Got {sequence_axis!r} "
                "with `page_table`."
            )
        for name in ("k_scale", "v_scale"):
            check_scale(name, getattr(self, name), (self.key.shape[0], key_heads))
        return pages

    def operands(self, accumulator: np.dtype[Any]) -> dict[str, Array]:
        """The operands of a call with pages: `[#B, ...]`."""
        rows = lambda array: jnp.asarray(array).reshape(1, -1, *of_heads(array.shape[2:], self.value is None))
        table = jnp.asarray(self.page_table)
        found = dict(
            key=rows(self.key),
            value=rows(self.key if self.value is None else self.value),
            page_table=table.reshape(-1, table.shape[-1]).astype(jnp.int32),
        )
        for name in ("k_scale", "v_scale"):
            if getattr(self, name) is not None:
                scale = jnp.asarray(getattr(self, name)).astype(accumulator)
                found[name] = scale.reshape(*[1] * (3 - scale.ndim), *scale.shape)
        return found


def check_pages(key: Any, value: Any, dtype: Any, head_dim: int) -> Pages:
    """How pages lie, beside queries or new keys of this dtype and head dimension; `value` is `None` if interleaved."""
    both = (("key", key),) if value is None else (("key", key), ("value", value))
    for name, array in both:
        _arguments.heads(name, array, "P, page_size, K, H", (*_arguments.DTYPES, *NARROW_DTYPES))
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(
                f"`{name}` must have the shape (P, page_size, K, H) with `page_table`, none of them 0. "
                f"Got {array.shape}."
            )
        if array.dtype != dtype and array.dtype.name not in NARROW_DTYPES:
            raise TypeError(
                f"`{name}` must have the query's dtype or one of {', '.join(NARROW_DTYPES)} with `page_table`. "
                f"Got {array.dtype} and {dtype}."
            )
    if key.shape[3] != head_dim:
        raise ValueError(f"`query` and `key` must have the same head dimension. Got H={head_dim} and H={key.shape[3]}.")
    if value is None:
        if key.shape[2] % 2 != 0:
            raise ValueError(
                "`key` must have a key and a value for each head where `value` is None, interleaved: "
                f"(P, page_size, 2 K, H). Got {key.shape}."
            )
    elif key.dtype != value.dtype:
        raise TypeError(f"`key` and `value` must have the same dtype. Got {key.dtype} and {value.dtype}.")
    elif key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "`key` and `value` must have the same pages and heads with `page_table`. "
            f"Got [P, page_size, K]={list(key.shape[:3])} and {list(value.shape[:3])}."
        )
    return Pages(size=key.shape[1], dtype=np.dtype(key.dtype), interleaved=value is None)


def heads_of(key: Any, pages: Pages) -> int:
    """The key heads of an array of pages."""
    return key.shape[2] // (2 if pages.interleaved else 1)


def of_heads(axes: tuple[int, int], interleaved: bool) -> tuple[int, int]:
    """The last two axes of pages with one row for each key head: interleaved heads 2 k and 2 k + 1 lie side by side."""
    heads, features = axes
    return (heads // 2, 2 * features) if interleaved else axes


def check_scale(name: str, value: Any, shape: tuple[int, int]) -> None:
    """A number, or a floating array that can be broadcast to `shape`, `[P, K]`; or `None`."""
    if value is None:
        return
    if not _arguments.is_array(value):
        _arguments.finite(name, value, "a number or a floating array")
        return
    _arguments.floating(name, value)
    padded = (1,) * (2 - value.ndim) + value.shape
    if value.ndim > 2 or any(have not in (1, want) for have, want in zip(padded, shape, strict=True)):
        raise ValueError(
            f"`{name}` must be a number, or broadcastable to one for each page and key head, {shape}. "
            f"Got shape {value.shape}."
        )
