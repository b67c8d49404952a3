"""`ragged_paged_attention`: prefill and decode of many sequences in one call, by the arguments of JAX's TPU kernel."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jflash import _arguments, _autodiff, _canonical, _dispatch, _mesh, _pages, _platform
from jflash._api import Implementation, PageScale, Scale
from jflash._ragged import Ragged
from jflash._semantics.dtypes import widened
from jflash._semantics.spec import shape_facts
from jflash._semantics.tokens import places

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)
"""The mask value of JAX's TPU kernel, whose default it is."""
_MOST_ROWS = 64
"""The most rows of a block of queries. A block has about as many as a sequence has tokens on average, so all blocks
together have at most three times as many rows as there are tokens."""

KVPages = Float[Array, "P page_size 2*K H"] | tuple[Float[Array, "P page_size K H"], Float[Array, "P page_size K D"]]

_log = logging.getLogger("jflash")
_said: set[str] = set()


class RaggedOptions(TypedDict, total=False):
    """The keyword arguments of `ragged_paged_attention` but `return_residual`."""

    sm_scale: Scale
    sliding_window: int | None
    soft_cap: float | None
    mask_value: float | None
    k_scale: PageScale | None
    v_scale: PageScale | None
    num_kv_pages_per_block: int | None
    num_queries_per_block: int | None
    vmem_limit_bytes: int | None
    sinks: Float[Array, "N"] | None
    implementation: Implementation


@overload
def ragged_paged_attention(
    q: Float[Array, "tokens N H"],
    kv_pages: KVPages,
    kv_lens: Int[Array, "seqs"],
    page_indices: Int[Array, "seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"],
    num_seqs: Int[Array, "1"],
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[RaggedOptions],
) -> Float[Array, "tokens N D"]: ...
@overload
def ragged_paged_attention(
    q: Float[Array, "tokens N H"],
    kv_pages: KVPages,
    kv_lens: Int[Array, "seqs"],
    page_indices: Int[Array, "seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"],
    num_seqs: Int[Array, "1"],
    *,
    return_residual: Literal[True],
    **options: Unpack[RaggedOptions],
) -> tuple[Float[Array, "tokens N D"], Float[Array, "tokens N"]]: ...
def ragged_paged_attention(
    q: Float[Array, "tokens N H"],
    kv_pages: KVPages,
    kv_lens: Int[Array, "seqs"],
    page_indices: Int[Array, "seqs pages"],
    cu_q_lens: Int[Array, "seqs+1"],
    num_seqs: Int[Array, "1"],
    *,
    sm_scale: Scale = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    sinks: Float[Array, "N"] | None = None,
    return_residual: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "tokens N D"] | tuple[Float[Array, "tokens N D"], Float[Array, "tokens N"]]:
    """Compute causal attention of many sequences with a paged cache, prefill and decode together.

    The arguments up to `vmem_limit_bytes` are those of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`: their
    names, order and defaults, so code that was written for TPUs runs. The keys of this step's tokens are in the cache
    already (`jflash.update_pages`). Shapes are static and contents traced: one compiled program serves every batch of
    up to `max_num_seqs` sequences and `tokens` tokens. There is no derivative.

    Args:
      q: `[tokens, N, H]`; the queries of all sequences, one after the other; float32, bfloat16, float16 or float64.
      kv_pages: `[P, page_size, 2 K, H]`, heads key 0, value 0, key 1, value 1, ...; or a pair of pages of keys and
        pages of values, `[P, page_size, K, H]` and `[P, page_size, K, D]`. In the query's dtype, or in int8,
        float8_e4m3fn or float8_e5m2.
      kv_lens: integer `[max_num_seqs]`; how many keys each sequence has, those of this step among them.
      page_indices: integer `[max_num_seqs, pages]`; key j of sequence i is row j % page_size of page
        `page_indices[i, j // page_size]`. Past a sequence's length it may hold anything.
      cu_q_lens: integer `[max_num_seqs + 1]`; sequence i has the tokens from `cu_q_lens[i]` to `cu_q_lens[i + 1]`. They
        are the last of its keys, so at most as many as these.
      num_seqs: integer `[1]`; how many sequences there are. The four arrays may hold anything past those.
      sm_scale: multiplies the dot products; a number or a scalar array. Default 1, as on TPUs, and not H**-0.5.
      sliding_window: how many keys a token sees: the last ones up to its own, which counts.
      soft_cap: c > 0 turns a scaled logit x into c * tanh(x / c).
      mask_value: is taken and not used: keys that a token may not see are left out, whatever their logit.
      k_scale: what the cache's keys are multiplied by; a number, or a floating array that broadcasts to `[P, K]`.
      v_scale: what the cache's values are multiplied by; a number, or a floating array that broadcasts to `[P, K]`.
      num_kv_pages_per_block: is taken and not used: it tunes the TPU kernel. The logger "jflash" says so once, at level
        INFO.
      num_queries_per_block: is taken and not used: it tunes the TPU kernel.
      vmem_limit_bytes: is taken and not used: it tunes the TPU kernel.
      sinks: floating `[N]`; one more logit per head that takes part in the softmax and has no value.
      return_residual: also return the log-sum-exp of the logits.
      implementation: as for `jflash.attention`, which also says what of a call is computed where.

    Returns:
      `[tokens, N, D]` in the query's dtype, 0 for tokens of no sequence; with `return_residual` a pair of that and the
      log-sum-exp, natural logarithm, `[tokens, N]`, float32 (float64 for float64), -inf for tokens of no sequence.

    Raises:
      ValueError: an argument has a wrong shape or value.
      TypeError: an argument is of a wrong kind or dtype, or traced where it must be known.
      NotImplementedError: no implementation asked can serve the call, or a derivative is taken.

    Example:
      A sequence of 5 keys whose last 3 tokens are prefilled, and one of 9 keys that decodes its next; pages of 4 keys.

      >>> import jax, jax.numpy as jnp, jflash
      >>> normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
      >>> q, kv_pages = normal(0, 8, 4, 16), normal(1, 10, 4, 2 * 2, 16)
      >>> page_indices = jnp.array([[7, 2, 0], [4, 9, 1]])
      >>> out = jflash.ragged_paged_attention(
      ...     q, kv_pages, jnp.array([5, 9]), page_indices, jnp.array([0, 3, 4]), jnp.array([2]), sm_scale=0.25
      ... )
      >>> out.shape, bool((out[4:] == 0).all())
      ((8, 4, 16), True)
    """
    names = _dispatch.candidates(implementation)
    return_residual = _arguments.static_bool("return_residual", return_residual)
    _arguments.heads("q", q, "tokens, N, H")
    if q.ndim != 3:
        raise ValueError(f"`q` must have the shape (tokens, N, H). Got {q.shape}.")
    named = _pages.named(kv_pages)
    pages = _pages.layout(named, "q", q)
    key = next(iter(named.values()))
    heads = _pages.key_heads(pages, key)
    _pages.grouped("q", q.shape[1], heads)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        _pages.check_scale(name, value, (key.shape[0], heads))
    batch = Ragged(kv_lens, page_indices, cu_q_lens, num_seqs)
    batch.check()
    _arguments.scale(sm_scale, "sm_scale")
    if sinks is not None:
        _arguments.per_head("sinks", sinks, q.shape[1])
    static = Static(
        scale=None if _arguments.is_array(sm_scale) else float(sm_scale),
        causal=True,
        window=_arguments.keys_back("sliding_window", sliding_window),
        soft_cap=_arguments.soft_cap(soft_cap, "soft_cap"),
        names=names,
        value_is_key=isinstance(kv_pages, tuple | list) and kv_pages[0] is kv_pages[1],
    )
    say_not_used(
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    arrays = dict(q=q, pages=(*named.values(),), k_scale=k_scale, v_scale=v_scale, sinks=sinks)
    arrays["scale"] = sm_scale if static.scale is None else None
    arrays: Any = jax.tree.map(jnp.asarray, arrays) | dict(batch=batch.in_32_bits())
    call: Any = functools.partial(attend, static)
    mesh = _mesh.explicit_mesh(jax.tree.leaves(arrays))
    if mesh is not None:
        call = jax.sharding.auto_axes(call, out_sharding=_mesh.following(arrays["q"], mesh))
    out, lse = call(arrays)
    return (out, lse) if return_residual else out


class Static(NamedTuple):
    """The facts of a call that are known when it is traced."""

    scale: float | None
    """`None` where the scale is an array."""
    causal: bool
    window: tuple[int, int] | None
    soft_cap: float | None
    names: _dispatch.Names
    """The names of the implementations that may serve."""
    value_is_key: bool = False
    """Whether the pair of pages is one array."""


@functools.partial(jax.jit, static_argnums=0)
def attend(static: Static, arrays: dict[str, Any]) -> tuple[Array, Array]:
    """Return output and log-sum-exp. Blocks of tokens, each of one sequence or of none, are the batch of a call with
    pages, whose queries stay where they are."""
    q, batch, (key, *value) = arrays["q"], arrays["batch"], arrays["pages"]
    tokens, seqs = q.shape[0], len(batch.kv_lens)
    if 0 in (tokens, seqs, *key.shape[:2], batch.page_indices.shape[1]):
        wide = widened(q.dtype)
        width = value[0].shape[3] if value else q.shape[2]
        return jnp.zeros((*q.shape[:2], width), q.dtype), jnp.full(q.shape[:2], -jnp.inf, wide)
    rows = min(_MOST_ROWS, 2 ** (-(-tokens // seqs) - 1).bit_length())
    blocks = batch.blocks(tokens, rows)
    spec, operands, _ = _canonical.canonicalize(
        # Of queries and page table nothing but the shape is asked: blocks have them together.
        query=jnp.zeros((len(blocks.start), rows, *q.shape[1:]), q.dtype),
        key=key,
        value=key if static.value_is_key else value[0] if value else None,
        scale=arrays["scale"] if static.scale is None else static.scale,
        is_causal=static.causal,
        local_window_size=static.window,
        logits_soft_cap=static.soft_cap,
        page_table=jnp.zeros((len(blocks.start), batch.page_indices.shape[1]), jnp.int32),
        query_seq_lengths=blocks.tokens,
        key_value_seq_lengths=blocks.keys,
        query_offset=blocks.position,
        k_scale=arrays["k_scale"],
        v_scale=arrays["v_scale"],
        sinks=arrays["sinks"],
    )
    of_all = dict(query=q[None], page_table=batch.page_indices)
    operands = operands._replace(**of_all, query_starts=blocks.start, table_rows=blocks.sequence)
    spec = dataclasses.replace(spec, **shape_facts(operands, spec.pages, rows))
    choice = _dispatch.select(spec, static.names, _platform.lowering_targets(jax.tree.leaves(operands)))
    out, lse = _autodiff.attend(choice, spec, operands, _autodiff.RESIDUAL_CHECKPOINT_NAMES)
    block, row = places(blocks.start, tokens)
    return out[0].astype(q.dtype), lse[block, :, row]


def say_not_used(**tuning: Any) -> None:
    """Log once for each argument that is given that it has no effect."""
    for name, value in tuning.items():
        if value is not None and name not in _said:
            _log.info("`%s` tunes the kernel for TPUs, and changes nothing here.", name)
            _said.add(name)
