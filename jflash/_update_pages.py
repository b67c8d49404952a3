"""`update_pages`: a step's keys and values into the pages of a cache, in place."""

from __future__ import annotations

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash import _arguments, _pages
from jflash._api import PageScale
from jflash._ragged import Ragged
from jflash._semantics.dtypes import widened
from jflash._semantics.spec import Pages

Both = Float[Array, "P page_size 2*K H"]
Latent = Float[Array, "P page_size K H"]
Pair = tuple[Float[Array, "P page_size K H"], Float[Array, "P page_size K D"]]


@overload
def update_pages(
    kv_pages: Both,
    keys: Float[Array, "*tokens K H"],
    values: Float[Array, "*tokens K D"],
    kv_lens: Int[Array, "*seqs"],
    page_indices: Int[Array, "*seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"] | None = None,
    num_seqs: Int[Array, "1"] | None = None,
    *,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
) -> Both: ...
@overload
def update_pages(
    kv_pages: Pair,
    keys: Float[Array, "*tokens K H"],
    values: Float[Array, "*tokens K D"],
    kv_lens: Int[Array, "*seqs"],
    page_indices: Int[Array, "*seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"] | None = None,
    num_seqs: Int[Array, "1"] | None = None,
    *,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
) -> Pair: ...
@overload
def update_pages(
    kv_pages: Latent,
    keys: Float[Array, "*tokens K H"],
    values: None,
    kv_lens: Int[Array, "*seqs"],
    page_indices: Int[Array, "*seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"] | None = None,
    num_seqs: Int[Array, "1"] | None = None,
    *,
    k_scale: PageScale | None = None,
) -> Latent: ...
def update_pages(
    kv_pages: Any,
    keys: Float[Array, "*tokens K H"],
    values: Float[Array, "*tokens K D"] | None,
    kv_lens: Int[Array, "*seqs"],
    page_indices: Int[Array, "*seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"] | None = None,
    num_seqs: Int[Array, "1"] | None = None,
    *,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
) -> Any:
    """Write the keys and values of a step's tokens into their places in the pages of a cache.

    The pages are donated: outside `jax.jit` the arrays that are given are no more, and the step is written into their
    memory. Inside, it is so if the outer function donates them, or if a loop carries them. A step costs as much as its
    tokens, whatever the size of the cache. Call it before the attention that sees these tokens.

    Args:
      kv_pages: as for `ragged_paged_attention`: `[P, page_size, 2 K, H]`, heads key 0, value 0, key 1, value 1, ...; or
        the pair `[P, page_size, K, H]`, `[P, page_size, K, D]`; or of a latent cache, whose rows are keys and values
        both, `[P, page_size, K, H]`. In the dtype of `keys`, or in int8, float8_e4m3fn or float8_e5m2: then numbers are
        divided by the scale, rounded, and kept within what the dtype can hold.
      keys: `[tokens, K, H]`, one sequence after the other; or, without `cu_q_lens`, `[*B, T, K, H]`.
      values: `[tokens, K, D]`, or `[*B, T, K, D]`, same dtype; `None` for a latent cache.
      kv_lens: integer `[max_num_seqs]`, or `[*B]`; how many keys each sequence has with those of this step, which are
        the last.
      page_indices: integer `[max_num_seqs, pages]`, or `[*B, pages]`; the pages of each sequence, in order.
      cu_q_lens: integer `[max_num_seqs + 1]`; sequence i has the tokens from `cu_q_lens[i]` to `cu_q_lens[i + 1]`. Left
        out, each sequence of the batch has T.
      num_seqs: integer `[1]`, with `cu_q_lens`; how many sequences there are. The arrays may hold anything past those.
      k_scale: what the cache's keys are multiplied by when they are read; a number, or a floating array that broadcasts
        to `[P, K]`.
      v_scale: what the cache's values are multiplied by when they are read; as `k_scale`.

    Returns:
      The updated pages, in the form in which they came. A token that has no place is left out: one of no sequence, one
      past the room of its row of `page_indices`, and one whose page is no page of the cache.

    Raises:
      ValueError: an argument has a wrong shape or value.
      TypeError: an argument is of a wrong kind or dtype.

    Example:
      Two sequences, one of 5 keys that gets its last 3, and one of 9 that gets its last; pages of 4 keys.

      >>> import jax.numpy as jnp, jflash
      >>> kv_pages = jnp.zeros((10, 4, 2 * 2, 16))
      >>> page_indices = jnp.array([[7, 2, 0], [4, 9, 1]])
      >>> new = jnp.ones((8, 2, 16)), jnp.ones((8, 2, 16))
      >>> kv_pages = jflash.update_pages(
      ...     kv_pages, *new, jnp.array([5, 9]), page_indices, jnp.array([0, 3, 4]), jnp.array([2])
      ... )
      >>> [kv_pages[page, :, 0, 0].tolist() for page in (7, 2, 1)]
      [[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """
    pages = _check(kv_pages, keys, values, k_scale, v_scale)
    if (cu_q_lens is None) != (num_seqs is None):
        raise ValueError("`cu_q_lens` and `num_seqs` must be given together, or neither. Got one of them.")
    if cu_q_lens is not None and num_seqs is not None:
        if keys.ndim != 3:
            raise ValueError(f"`keys` must have the shape (tokens, K, H) with `cu_q_lens`. Got {keys.shape}.")
        batch = Ragged(kv_lens, page_indices, cu_q_lens, num_seqs)
        batch.check()
    else:
        batch = _of_one_length(keys, kv_lens, page_indices)
    caches = tuple(map(jnp.asarray, _pages.named(kv_pages).values()))
    given = (keys, k_scale), (values, v_scale)
    new = tuple(
        (jnp.asarray(array).reshape(-1, *array.shape[-2:]), scale) for array, scale in given if array is not None
    )
    updated = _update(pages, caches, new, batch.in_32_bits())
    return updated[0] if len(updated) == 1 else updated


def _check(kv_pages: Any, keys: Any, values: Any, k_scale: Any, v_scale: Any) -> Pages:
    """Check that keys, values and scales go with the pages, and return their layout."""
    dtypes = (*_arguments.DTYPES, *_pages.NARROW_DTYPES)
    _arguments.heads("keys", keys, "tokens, K, H", dtypes)
    named = _pages.named(kv_pages)
    pages = _pages.layout(named, "keys", keys, is_latent=values is None)
    key, *others = named.values()
    heads, value = _pages.key_heads(pages, key), others[0] if others else key
    new = [("keys", keys, key.shape[3])]
    if values is not None:
        _arguments.heads("values", values, "tokens, K, D", dtypes)
        new.append(("values", values, value.shape[3]))
        if values.dtype != keys.dtype:
            raise TypeError(f"`keys` and `values` must have the same dtype. Got {keys.dtype} and {values.dtype}.")
    elif others:
        raise ValueError("`values` must be given with a pair of pages. Got None.")
    elif v_scale is not None:
        raise ValueError("`v_scale` scales values. Got it with `values=None`.")
    for name, array, width in new:
        wanted = (*keys.shape[:-2], heads, width)
        if array.shape != wanted:
            raise ValueError(f"`{name}` must have the shape {wanted}, for these pages. Got {array.shape}.")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _pages.check_scale(name, scale, (key.shape[0], heads))
        if scale is not None and keys.dtype.name not in _arguments.DTYPES:
            raise ValueError(f"`{name}` divides keys and values that are not in 8 bits yet. Got it with {keys.dtype}.")
    return pages


def _of_one_length(keys: Any, kv_lens: Any, page_indices: Any) -> Ragged:
    """Return the batch of sequences that all have as many tokens."""
    *axes, length = keys.shape[:-2]
    _arguments.integers("kv_lens", kv_lens)
    _arguments.integers("page_indices", page_indices)
    if kv_lens.shape != (*axes,):
        raise ValueError(f"`kv_lens` must have the shape {(*axes,)} without `cu_q_lens`. Got {kv_lens.shape}.")
    if page_indices.ndim == 0 or page_indices.shape[:-1] != (*axes,):
        raise ValueError(
            f"`page_indices` must have the shape (*{(*axes,)}, pages) without `cu_q_lens`. Got {page_indices.shape}."
        )
    kv_lens = jnp.asarray(kv_lens).reshape(-1)
    seqs = len(kv_lens)
    starts = length * np.arange(seqs + 1, dtype=np.int32)
    table = jnp.asarray(page_indices).reshape(seqs, page_indices.shape[-1])
    return Ragged(kv_lens, table, jnp.asarray(starts), jnp.full(1, seqs, jnp.int32))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(
    pages: Pages, caches: tuple[Array, ...], new: tuple[tuple[Array, Any], ...], batch: Ragged
) -> tuple[Array, ...]:
    """Write each token to its row of the pages, from arrays with what divides them. One without a place goes past the
    last row, and is dropped."""
    count, width = caches[0].shape[0], batch.page_indices.shape[1]
    if width == 0 or len(batch.kv_lens) == 0:
        return caches
    own = batch.tokens(len(new[0][0]))
    page = batch.page_indices[own.sequence, jnp.clip(own.position // pages.size, 0, width - 1)]
    fits = own.is_one & (own.position >= 0) & (own.position < width * pages.size) & (page >= 0) & (page < count)
    row = jnp.where(fits, page * pages.size + own.position % pages.size, count * pages.size)
    page = jnp.where(fits, page, 0)
    rows = [_quantized(array, scale, page, pages.dtype) for array, scale in new]
    if pages.interleaved:
        rows = [jnp.stack(rows, axis=2).reshape(len(row), *caches[0].shape[2:])]
    flat = [cache.reshape(-1, *cache.shape[2:]) for cache in caches]
    updated = [cache.at[row].set(some, mode="drop") for cache, some in zip(flat, rows, strict=True)]
    return tuple(array.reshape(cache.shape) for array, cache in zip(updated, caches, strict=True))


def _quantized(
    array: Float[Array, "tokens K H"], scale: Any, page: Int[Array, "tokens"], dtype: np.dtype[Any]
) -> Array:
    """Return the numbers as pages of `dtype` hold them: divided by the scale, rounded, within the dtype's range."""
    if array.dtype == dtype and scale is None:
        return array
    wide = array.astype(widened(array.dtype))
    if scale is not None:
        each = jnp.asarray(scale, wide.dtype)
        each = each.reshape(*[1] * (2 - each.ndim), *each.shape)
        wide = wide / (each if each.shape[0] == 1 else each[page])[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        wide, limits = jnp.round(wide), jnp.iinfo(dtype)
    else:
        limits = jnp.finfo(dtype)
    return jnp.clip(wide, float(limits.min), float(limits.max)).astype(dtype)
