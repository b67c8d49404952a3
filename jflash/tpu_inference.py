"""`ragged_paged_attention` as vLLM's tpu-inference calls it since its third version: a call that also fills the cache.

    from jflash.tpu_inference import ragged_paged_attention

stands in place of `tpu_inference.kernels.ragged_paged_attention.v3.kernel.ragged_paged_attention`. In that library's
layout a cache is `[P, page_size, 2 K / p, p, H]`, where p numbers of its dtype have 32 bits, 2 K is rounded up to a
multiple of p, and H to a multiple of 128. In memory these are heads key 0, value 0, key 1, value 1, ..., as in
`jflash.ragged_paged_attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jflash import _arguments, _dispatch
from jflash._api import Implementation
from jflash._ragged import Ragged
from jflash._ragged_attention import Static, attend, say_not_used
from jflash._semantics.dtypes import widened
from jflash._update_pages import update_pages

__all__ = ["get_kv_cache_shape", "ragged_paged_attention"]

_LANES = 128
"""A TPU's vectors are so wide, and so are heads in the cache a multiple of it."""


def get_kv_cache_shape(
    total_num_pages: int, page_size: int, actual_num_kv_heads: int, actual_head_dim: int, kv_dtype: Any
) -> tuple[int, int, int, int, int]:
    """Return the shape of a cache, `(P, page_size, 2 K / p, p, H)`, as tpu-inference's function of this name does.

    Example:
      >>> import jax.numpy as jnp, jflash.tpu_inference
      >>> jflash.tpu_inference.get_kv_cache_shape(100, 16, 8, 64, jnp.bfloat16)
      (100, 16, 8, 2, 128)
    """
    packing = 4 // jnp.dtype(kv_dtype).itemsize
    return (
        total_num_pages,
        page_size,
        -(-2 * actual_num_kv_heads // packing),
        packing,
        _round_up(actual_head_dim, _LANES),
    )


def ragged_paged_attention(
    queries: Float[Array, "tokens N H"],
    keys: Float[Array, "tokens K H"],
    values: Float[Array, "tokens K H"],
    kv_cache: Float[Array, "P page_size heads p lanes"],
    kv_lens: Int[Array, "seqs"],
    page_indices: Int[Array, "seqs*pages"],
    cu_q_lens: Int[Array, "seqs+1"],
    distribution: Int[Array, "3"],
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    skip_kv_mask: bool = False,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    mask_value: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, int, int, int] | None = None,
    p_block_sizes: tuple[int, int, int, int] | None = None,
    m_block_sizes: tuple[int, int, int, int] | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
    implementation: Implementation = None,
) -> tuple[Float[Array, "tokens N H"], Float[Array, "P page_size heads p lanes"]]:
    """Write a step's keys and values into the cache, and attend to it, with the arguments of tpu-inference.

    The cache is donated: outside `jax.jit` the array that is given is no more. All but `implementation` is as in
    tpu-inference; there is no derivative.

    Args:
      queries: `[tokens, N, H]`; the queries of all sequences, one after the other.
      keys: `[tokens, K, H]`, in the cache's dtype: quantized already, if that has 8 bits.
      values: `[tokens, K, H]`, as the keys.
      kv_cache: of `get_kv_cache_shape`, in the queries' dtype or one of 8 bits.
      kv_lens: integer `[max_num_seqs]`; the keys of each sequence, those of this step among them.
      page_indices: integer `[max_num_seqs * pages]`; the pages of each sequence, in order.
      cu_q_lens: integer `[max_num_seqs + 1]`; sequence i has the tokens from `cu_q_lens[i]` to `cu_q_lens[i + 1]`.
      distribution: integer `[3]`; the last is the number of sequences. On a TPU the first two say which of them decode
        and which are chunks of a prefill; they change nothing here.
      use_causal_mask: whether a token sees no later token. Without it, `sliding_window` is not used either.
      update_kv_cache: whether `keys` and `values` are written. If not, they are in the cache already.
      skip_kv_mask: is taken and not used: it saves a TPU's time.
      sm_scale: multiplies the dot products.
      sliding_window: how many keys a token sees: the last ones up to its own, which counts.
      soft_cap: c > 0 turns a scaled logit x into c * tanh(x / c).
      out_dtype: of the output. Default float32 for queries in float32, else bfloat16.
      mask_value: is taken and not used: keys that a token may not see are left out, whatever their logit.
      q_scale: queries are divided by it and rounded to the cache's dtype, and the logits are multiplied by it.
      k_scale: what the cache's keys are multiplied by.
      v_scale: what the cache's values are multiplied by.
      chunk_prefill_size: is taken and not used, as all that tunes the TPU kernel. The logger "jflash" says so once.
      d_block_sizes: is taken and not used.
      p_block_sizes: is taken and not used.
      m_block_sizes: is taken and not used.
      vmem_limit_bytes: is taken and not used.
      debug_mode: on a TPU it prints and computes nothing. Refused here.
      disable_bounds_checks: is taken and not used.
      disable_semaphore_checks: is taken and not used.
      implementation: as for `jflash.attention`.

    Returns:
      The output `[tokens, N, H]`, 0 for tokens of no sequence, and the updated cache.

    Raises:
      ValueError: an argument has a wrong shape or value.
      TypeError: an argument is of a wrong kind or dtype, or traced where it must be known.
      NotImplementedError: `debug_mode`; or no implementation asked can serve the call.

    Example:
      A sequence whose 3 first tokens are prefilled, in pages of 4.

      >>> import jax.numpy as jnp, jflash.tpu_inference as rpa
      >>> cache = jnp.zeros(rpa.get_kv_cache_shape(6, 4, 2, 64, jnp.bfloat16), jnp.bfloat16)
      >>> new = [jnp.ones((8, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
      >>> batch = jnp.array([3]), jnp.array([5, 1]), jnp.array([0, 3]), jnp.array([0, 0, 1])
      >>> out, cache = rpa.ragged_paged_attention(*new, cache, *batch, sm_scale=0.125)
      >>> out[:4, 0, 0].tolist(), cache[5, :, 0, 0, 0].tolist()
      ([1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    """
    if debug_mode:
        raise NotImplementedError("`debug_mode` prints what a TPU's kernel would do, and computes nothing.")
    say_not_used(
        chunk_prefill_size=chunk_prefill_size,
        d_block_sizes=d_block_sizes,
        p_block_sizes=p_block_sizes,
        m_block_sizes=m_block_sizes,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    _check(queries, keys, values, kv_cache)
    _check_batch(kv_lens, page_indices, distribution)
    causal = _arguments.static_bool("use_causal_mask", use_causal_mask)
    window = _arguments.keys_back("sliding_window", sliding_window)
    for name, value in dict(sm_scale=sm_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale).items():
        if value is not None:
            _arguments.scale(value, name)
    static = Static(
        scale=None,
        causal=causal,
        window=window if causal else None,
        soft_cap=_arguments.soft_cap(soft_cap, "soft_cap"),
        names=_dispatch.candidates(implementation),
    )
    batch = Ragged(kv_lens, jnp.asarray(page_indices).reshape(len(kv_lens), -1), cu_q_lens, distribution[2:])
    batch.check()
    arrays = dict(queries=queries, keys=keys, values=values, batch=batch.in_32_bits())
    arrays |= dict(sm_scale=sm_scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    update = _arguments.static_bool("update_kv_cache", update_kv_cache)
    out, kv_cache = _step(static, update, jnp.asarray(kv_cache), arrays)
    if out_dtype is None:
        out_dtype = jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16
    return out.astype(out_dtype), kv_cache


def _check(queries: Any, keys: Any, values: Any, kv_cache: Any) -> None:
    """Check shapes and dtypes of what is in the cache, and of what goes there."""
    for name, array in dict(queries=queries, keys=keys, values=values).items():
        _arguments.array(name, array)
        if array.ndim != 3:
            raise ValueError(f"`{name}` must have the axes (tokens, heads, H). Got {array.shape}.")
    _arguments.array("kv_cache", kv_cache)
    if not kv_cache.dtype == keys.dtype == values.dtype:
        raise TypeError(
            "`keys` and `values` must have the dtype of `kv_cache`. "
            f"Got {keys.dtype}, {values.dtype} and {kv_cache.dtype}."
        )
    if keys.shape != values.shape or (queries.shape[0], queries.shape[2]) != (keys.shape[0], keys.shape[2]):
        raise ValueError(
            "`keys` and `values` must have the same shape, and tokens and H of `queries`. "
            f"Got {keys.shape}, {values.shape} and {queries.shape}."
        )
    shape = None
    if kv_cache.ndim == 5:
        (pages, page_size, *_), (_, heads, head_dim) = kv_cache.shape, keys.shape
        shape = get_kv_cache_shape(pages, page_size, heads, head_dim, kv_cache.dtype)
    if kv_cache.shape != shape:
        raise ValueError(
            f"`kv_cache` must have the shape {shape or '(P, page_size, 2 K / p, p, H)'} for these keys. "
            f"Got {kv_cache.shape}."
        )
    if queries.shape[1] % keys.shape[1] != 0:
        raise ValueError(
            f"`queries` heads must be a multiple of the key heads. Got N={queries.shape[1]} and K={keys.shape[1]}."
        )


def _check_batch(kv_lens: Any, page_indices: Any, distribution: Any) -> None:
    """Check shapes and dtypes of what says where the sequences are."""
    _arguments.integers("page_indices", page_indices)
    _arguments.integers("distribution", distribution)
    _arguments.integers("kv_lens", kv_lens)
    if page_indices.ndim != 1 or kv_lens.ndim != 1 or page_indices.shape[0] % max(kv_lens.shape[0], 1) != 0:
        raise ValueError(
            "`page_indices` must have the shape (max_num_seqs * pages,), and `kv_lens` (max_num_seqs,). "
            f"Got {page_indices.shape} and {kv_lens.shape}."
        )
    if distribution.shape != (3,):
        raise ValueError(f"`distribution` must have the shape (3,). Got {distribution.shape}.")


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _step(static: Static, update: bool, kv_cache: Array, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Return output and cache. Heads are as many and as wide as in the cache; queries are 0 in the rest."""
    queries, keys, values, batch = (arrays[name] for name in ("queries", "keys", "values", "batch"))
    _, heads, head_dim = queries.shape
    pages = kv_cache.reshape(*kv_cache.shape[:2], -1, kv_cache.shape[-1])
    key_heads, width = pages.shape[2] // 2, pages.shape[3]
    group = heads // keys.shape[1]
    more_heads, more = key_heads - keys.shape[1], width - head_dim
    if update:
        new = [jnp.pad(array, ((0, 0), (0, more_heads), (0, more))) for array in (keys, values)]
        pages = update_pages(pages, *new, *batch)
    scale = arrays["sm_scale"]
    if arrays["q_scale"] is not None:
        limits = jnp.finfo(kv_cache.dtype)
        narrow = jnp.clip(queries / arrays["q_scale"], float(limits.min), float(limits.max)).astype(kv_cache.dtype)
        queries, scale = narrow.astype(queries.dtype), scale * arrays["q_scale"]
    queries = jnp.pad(queries, ((0, 0), (0, more_heads * group), (0, more)))
    out, _ = attend(
        static,
        dict(
            q=queries,
            pages=(pages,),
            batch=batch,
            scale=jnp.asarray(scale, widened(queries.dtype)),
            k_scale=arrays["k_scale"],
            v_scale=arrays["v_scale"],
            sinks=None,
        ),
    )
    return out[:, :heads, :head_dim], pages.reshape(kv_cache.shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
