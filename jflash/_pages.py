"""Check the arguments of a call with a paged cache, and bring them into canonical form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jflash import _arguments
from jflash._semantics.spec import Pages

NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
"""The dtypes that a cache may have besides the query's. Each of their numbers is one of bfloat16 and of float16."""


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
        """The keys that a row of the page table has room for."""
        return self.page_table.shape[-1] * self.key.shape[1]

    def check(self, query: Any, key_value_seq_lengths: Any, sequence_axis: Any) -> Pages | None:
        """Check the arguments, and return the layout of the pages; `None` where there are none.

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
        named = {name: getattr(self, name) for name in ("key", "value") if name == "key" or self.value is not None}
        pages = layout(named, "query", query)
        heads = key_heads(pages, self.key)
        grouped("query", query.shape[-2], heads)
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
        scales = dict(k_scale=self.k_scale, v_scale=self.v_scale)
        for name, scale in scales.items():
            check_scale(name, scale, (self.key.shape[0], heads))
        by_page = any(np.ndim(scale) == 2 and np.shape(scale)[0] > 1 for scale in scales.values())
        return dataclasses.replace(pages, scaled_by_page=by_page)

    def operands(self, accumulator: np.dtype[Any]) -> dict[str, Array]:
        """Return the operands that hold keys and values in pages, each `[#B, ...]`."""
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


def named(kv_pages: Any) -> dict[str, Any]:
    """Return the one or two arrays of the argument `kv_pages`, by names for messages.

    Raises:
      ValueError: if they are not one or two.
    """
    if not isinstance(kv_pages, tuple | list):
        return {"kv_pages": kv_pages}
    if len(kv_pages) != 2:
        raise ValueError(f"`kv_pages` must be one array, or a pair of those of keys and values. Got {len(kv_pages)}.")
    return {f"kv_pages[{index}]": array for index, array in enumerate(kv_pages)}


def layout(named: Mapping[str, Any], beside: str, array: Any, *, is_latent: bool = False) -> Pages:
    """Return the layout of some arrays of pages.

    Args:
      named: by their names for messages, one array of both, or one of keys and one of values.
      beside: the name of the array of queries, or of new keys, that they go with.
      array: that array.
      is_latent: whether the rows of one array are keys and values both, and have no head for values.

    Raises:
      ValueError, TypeError: if they are none, or do not go with each other or with that array.
    """
    dtype, head_dim = array.dtype, array.shape[-1]
    for name, pages in named.items():
        _arguments.heads(name, pages, "P, page_size, K, H", (*_arguments.DTYPES, *NARROW_DTYPES))
        if pages.ndim != 4 or 0 in pages.shape:
            raise ValueError(
                f"`{name}` of a paged cache must have the shape (P, page_size, K, H), without a 0. Got {pages.shape}."
            )
        if pages.dtype != dtype and pages.dtype.name not in NARROW_DTYPES:
            raise TypeError(
                f"`{name}` of a paged cache must have the dtype of `{beside}` or one of {', '.join(NARROW_DTYPES)}. "
                f"Got {pages.dtype} and {dtype}."
            )
    (first, key), *others = named.items()
    if key.shape[3] != head_dim:
        raise ValueError(
            f"`{beside}` and `{first}` must have the same head dimension. Got H={head_dim} and H={key.shape[3]}."
        )
    interleaved = not others and not is_latent
    if interleaved and key.shape[2] % 2 != 0:
        raise ValueError(
            f"`{first}` must have a key and a value for each head where it has both: (P, page_size, 2 K, H). "
            f"Got {key.shape}."
        )
    for name, value in others:
        if key.dtype != value.dtype:
            raise TypeError(f"`{first}` and `{name}` must have the same dtype. Got {key.dtype} and {value.dtype}.")
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"`{first}` and `{name}` of a paged cache must have the same pages and heads. "
                f"Got [P, page_size, K]={list(key.shape[:3])} and {list(value.shape[:3])}."
            )
    return Pages(size=key.shape[1], dtype=np.dtype(key.dtype), interleaved=interleaved)


def key_heads(pages: Pages, key: Any) -> int:
    """Return how many key heads an array of pages has."""
    return key.shape[2] // (2 if pages.interleaved else 1)


def grouped(name: str, heads: int, key_heads: int) -> None:
    """Check that the query heads share the key heads evenly."""
    if heads % key_heads != 0:
        raise ValueError(f"`{name}` heads must be a multiple of the key heads. Got N={heads} and K={key_heads}.")


def of_heads(axes: tuple[int, int], interleaved: bool) -> tuple[int, int]:
    """Return the last two axes with one entry for each key head: interleaved, its key and its value side by side."""
    heads, features = axes
    return (heads // 2, 2 * features) if interleaved else axes


def check_scale(name: str, value: Any, shape: tuple[int, int]) -> None:
    """Check that a scale is `None`, a number, or a floating array that broadcasts to `shape`, `[P, K]`."""
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
