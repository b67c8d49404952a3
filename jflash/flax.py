"""`jflash.attention` inside Flax's attention layers.

    nnx.MultiHeadAttention(8, 512, attention_fn=jflash.flax.attention_fn, decode=False, rngs=nnx.Rngs(0))
    linen.MultiHeadDotProductAttention(8, attention_fn=jflash.flax.attention_fn)

Options that `jflash.attention` has and Flax lacks are bound by name:

    attention_fn=functools.partial(jflash.flax.attention_fn, local_window_size=(255, 0), logits_soft_cap=50.0)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jflash._api import (
    CheckpointName,
    Implementation,
    Lengths,
    Offset,
    Scale,
    Segments,
    SequenceStrategy,
    Window,
    attention,
)
from jflash._autodiff import RESIDUAL_CHECKPOINT_NAMES
from jflash._semantics.score_mod import ScoreModFunction
from jflash._tile_map import MaskModArgument

try:
    from flax.linen.dtypes import promote_dtype
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("jflash.flax needs Flax: pip install 'jflash[flax]'", name=error.name) from error

__all__ = ["attention_fn"]


# flax.linen passes only the arguments that it finds by name in the signature, so each one that a layer knows is here.
# Behind **kwargs a mask would be lost silently.
def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Shaped[Array, "*#B #N #T #S"] | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    scale: Scale | None = None,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    score_mod: ScoreModFunction | None = None,
    mask_mod: MaskModArgument | None = None,
    query_offset: Offset | None = None,
    segment_ids: Segments | None = None,
    sinks: Float[Array, " N"] | None = None,
    reproducible: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_strategy: SequenceStrategy | None = None,
    residual_checkpoint_name: CheckpointName = RESIDUAL_CHECKPOINT_NAMES,
) -> Float[Array, "*B T N D"]:
    """Attend as the `attention_fn` of `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`.

    It differs from Flax's own in two ways: a query that sees no key gets 0, not the mean of the values, and the softmax
    is computed in float32 at least.

    Args:
      query: `[*B, T, N, H]`.
      key: `[*B, S, K, H]`, N a multiple of K.
      value: `[*B, S, K, D]`.
      bias: as in `jflash.attention`. An additive float mask belongs here.
      mask: as in `jflash.attention`, or of a numeric dtype, as Flax's `make_causal_mask` and `combine_masks` give it:
        0 hides the key, any other value shows it.
      broadcast_dropout: True drops the same for all batch entries and heads.
      dropout_rng: a JAX random key, needed when `dropout_rate` is above 0 and `deterministic` is False.
      dropout_rate: 0 <= rate < 1.
      deterministic: True turns dropout off, as everywhere in Flax. The `deterministic` of `jflash.attention` is
        `reproducible` here.
      dtype: the dtype to which query, key and value are cast; None for the one they promote to.
      precision: as in `jflash.attention`; the layers pass their own.
      module: the layer, if it was called with `sow_weights=True`; refused, for the weights never exist.
      is_causal: as in `jflash.attention`. The nnx layer always passes it, from `layer(x, is_causal=True)`, which
        overrides a bound value; for the linen layer it must be bound.
      force_fp32_for_softmax: has no effect; that is always so.
      qk_attn_weights_einsum: refused, for there is no einsum to replace.
      attn_weights_value_einsum: refused, for there is no einsum to replace.
      scale: as in `jflash.attention`, like all arguments below unless they say otherwise.
      query_seq_lengths: `[*B]`.
      key_value_seq_lengths: `[*B]`.
      local_window_size: (left, right) or one number.
      implementation: which backends may serve.
      logits_soft_cap: c in c * tanh(x / c).
      alibi_slopes: `[N]`.
      score_mod: a function of one logit and its indices.
      mask_mod: a function of indices that says who sees whom, or what `jflash.tile_map` made of it.
      query_offset: where query 0 stands among the keys; None for 0. Flax does not say where a decoding step
        stands: with `decode=True` it must be bound to the layer's cache index, step by step, if `is_causal`,
        `local_window_size`, `alibi_slopes`, `score_mod` or `mask_mod` is bound.
      segment_ids: `[*B, T]` or a pair.
      sinks: `[N]`.
      reproducible: the `deterministic` of `jflash.attention`: the same bits on every run.
      sequence_axis: where a `jax.shard_map` splits T and S; bound to the layer that is called inside it.
      sequence_strategy: "ring", "all_to_all" or "gather".
      residual_checkpoint_name: what policies of `jax.checkpoint` call the output and the log-sum-exp.

    Returns:
      `[*B, T, N, D]` in the dtype that the arguments were cast to.

    Raises:
      NotImplementedError: for `module`, `qk_attn_weights_einsum` and `attn_weights_value_einsum`.
      ValueError: an option depends on the position of a decoding step and `query_offset` is not given, or dropout
        has no key.
      What `jflash.attention` raises, besides.

    Example:
      >>> import functools
      >>> import jax.numpy as jnp, jflash.flax
      >>> from flax import nnx
      >>> window = functools.partial(jflash.flax.attention_fn, local_window_size=(15, 0))  # an option that Flax lacks
      >>> layer = nnx.MultiHeadAttention(4, 32, attention_fn=window, decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 64, 32)), is_causal=True).shape
      (2, 64, 32)
    """
    del force_fp32_for_softmax
    _refuse_weights(module, qk_attn_weights_einsum, attn_weights_value_einsum)
    if deterministic:
        dropout_rate = 0.0
    elif dropout_rate > 0 and dropout_rng is None:
        raise ValueError(f"`dropout_rng` is needed if `dropout_rate` > 0. Got dropout_rate={dropout_rate} and no key.")
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    if query_offset is None:
        query_offset = 0
        _refuse_unknown_position(
            query, key, is_causal=is_causal or None, local_window_size=local_window_size, alibi_slopes=alibi_slopes,
            score_mod=score_mod, mask_mod=mask_mod,
        )  # fmt: skip
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    return attention(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
        implementation=implementation, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes,
        score_mod=score_mod, mask_mod=mask_mod, query_offset=query_offset, segment_ids=segment_ids, sinks=sinks,
        dropout_rate=dropout_rate, dropout_key=dropout_rng, broadcast_dropout=broadcast_dropout, precision=precision,
        deterministic=reproducible, sequence_axis=sequence_axis, sequence_strategy=sequence_strategy,
        residual_checkpoint_name=residual_checkpoint_name,
    )  # fmt: skip


def _refuse_weights(module: Any, *einsums: Any) -> None:
    """Refuse what looks at the attention weights, or replaces the products that make or take them."""
    if module is not None:
        raise NotImplementedError(
            "`sow_weights=True` asks for the attention weights, which jflash never has as an array. "
            "Use Flax's own dot_product_attention to look at them."
        )
    if einsums != (None, None):
        raise NotImplementedError(
            "`qk_attn_weights_einsum` and `attn_weights_value_einsum` replace the matrix products of Flax's own "
            "attention; jflash computes them inside its kernels and cannot take others."
        )


def _refuse_unknown_position(query: Array, key: Array, **options: Any) -> None:
    """Refuse a decoding step without an offset: one query and several keys do not tell at which key the query is.

    Of the `options`, which go by position, those that are not in use are None.
    """
    query_length, key_length = query.shape[-3], key.shape[-3]
    positional = [f"`{name}`" for name, option in options.items() if option is not None]
    if positional and query_length == 1 and key_length > 1:
        raise ValueError(
            "`query_offset` must say where the one query of a decoding step stands among the keys: "
            f"{', '.join(positional)} depends on it, and Flax does not tell. Got T=1, S={key_length} and no offset."
        )
