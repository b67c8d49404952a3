"""The public functions: `attention` and `explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jflash import (
    _arguments,
    _autodiff,
    _canonical,
    _coverage,
    _dispatch,
    _hints,
    _mesh,
    _pages,
    _platform,
    _split,
    _tile_map,
)
from jflash._semantics.dtypes import widened
from jflash._semantics.score_mod import ScoreModFunction, trace_score_mod
from jflash._semantics.spec import Spec
from jflash._tile_map import MaskModArgument

Implementation = str | Sequence[str] | None
Scale = float | Float[Array, ""]
Lengths = Int[Array, "*B"]
Window = int | tuple[int, int]
Offset = int | Int[Array, "*#B"]
SequenceStrategy = Literal["ring", "all_to_all", "gather"]
PageScale = float | Float[Array, "*#PK"]
CheckpointName = str | tuple[str, str]
Segments = Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]]


class Options(TypedDict, total=False):
    """The keyword arguments that `attention` and `explain` share."""

    scale: Scale | None
    is_causal: bool
    query_seq_lengths: Lengths | None
    key_value_seq_lengths: Lengths | None
    local_window_size: Window | None
    implementation: Implementation
    logits_soft_cap: float | None
    alibi_slopes: Float[Array, "N"] | None
    score_mod: ScoreModFunction | None
    mask_mod: MaskModArgument | None
    query_offset: Offset | None
    segment_ids: Segments | None
    sinks: Float[Array, "N"] | None
    dropout_rate: float
    dropout_key: Array | None
    broadcast_dropout: bool
    precision: Any
    deterministic: bool
    sequence_axis: str | tuple[str, ...] | None
    sequence_strategy: SequenceStrategy | None
    page_table: Int[Array, "*B pages"] | None
    k_scale: PageScale | None
    v_scale: PageScale | None
    residual_checkpoint_name: CheckpointName


@overload
def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"] | None,
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> Float[Array, "*B T N D"]: ...
@overload
def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"] | None,
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[Float[Array, "*B T N D"], Float[Array, "*B T N"]]: ...
def attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"] | None,
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[Array, "N"] | None = None,
    score_mod: ScoreModFunction | None = None,
    mask_mod: MaskModArgument | None = None,
    query_offset: Offset | None = None,
    segment_ids: Segments | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    deterministic: bool = False,
    sequence_axis: str | tuple[str, ...] | None = None,
    sequence_strategy: SequenceStrategy | None = None,
    page_table: Int[Array, "*B pages"] | None = None,
    k_scale: PageScale | None = None,
    v_scale: PageScale | None = None,
    residual_checkpoint_name: CheckpointName = _autodiff.RESIDUAL_CHECKPOINT_NAMES,
) -> Float[Array, "*B T N D"] | tuple[Float[Array, "*B T N D"], Float[Array, "*B T N"]]:
    r"""Compute exact softmax attention in O(T + S) memory per head, with derivatives of every order in both modes.

    The output of every batch entry and head is :math:`\mathrm{softmax}(\mathrm{logits}) V`, where the logits are made
    from :math:`Q K^T` in this order: scale, soft cap, bias, ALiBi, `score_mod`, masks. The arguments of
    `jax.nn.dot_product_attention` keep its names, layout and order. Axes: any number of batch axes B, T queries,
    S keys, N query heads, K key heads, head dimensions H and D.

    A query that sees no key gets output 0, log-sum-exp -inf and zero gradients. A key whose logit is -inf counts as
    not seen.

    Args:
      query: `[*B, T, N, H]`; float32, bfloat16, float16 or float64.
      key: `[*B, S, K, H]`, same dtype. N must be a multiple of K: head n attends with key head n // (N // K)
        (grouped queries, arXiv:2305.13245).
      value: `[*B, S, K, D]`, same dtype. Where it is `key` itself, a latent cache, a kernel may read it once.
      bias: floating, added to the logits; each of the axes `[*B, N, T, S]` may be 1 or, from the left, missing. Its
        gradient has its shape.
      mask: bool, True where the query may attend; its axes follow the rule of `bias`.
      scale: multiplies the dot products; a number, or a scalar array, which has a gradient. Default H**-0.5.
      is_causal: query i sees key j only if j <= i + query_offset.
      query_seq_lengths: integer `[*B]`, 0 to T. Queries at or past it are padding: their rows come out 0, and
        nothing they hold, NaN included, reaches any output or gradient. Traced values are clamped to the range.
      key_value_seq_lengths: integer `[*B]`, 0 to S. Keys and values at or past it are padding, which reaches nothing
        either.
      local_window_size: (left, right), or one number for both: query i sees key j only if
        i + query_offset - left <= j <= i + query_offset + right. Neither may be negative. (127, 0) is a window of 128
        keys that ends with the query's own; a side of S is no limit.
      implementation: "mosaic_gpu", "mosaic_gpu_mma", "cudnn", "xla", "reference" or "metal", or several of them in
        order of preference. None asks all but "metal" in this order, on Blackwell "cudnn" before "mosaic_gpu_mma".
        `explain` says which one serves.
      return_residual: also return the log-sum-exp of the logits.
      logits_soft_cap: c > 0 turns a scaled logit x into c * tanh(x / c) (arXiv:2408.00118, section 2).
      alibi_slopes: floating `[N]`; adds -slope * abs(i + query_offset - j) (arXiv:2108.12409, section 3).
      score_mod: `f(logit, batch, head, query_index, key_index) -> logit` on scalars, any traceable function. Arrays
        that it closes over have gradients. Indices count from 0, without `query_offset`; batch axes count as one.
        Python's numbers have 32 bits beside a float32 logit, with `jax_enable_x64` too. Where neither bias, slopes nor
        a cap come before it, c * tanh(logit / c) alone is computed as `logits_soft_cap=c`.
        Reuse one function object: outside `jax.jit` a new one compiles anew.
      mask_mod: `f(batch, head, query_index, key_index) -> bool` on scalars, any traceable function: True where
        the query may attend, as far as all other masks let it. Indices as in `score_mod`. Arrays that it closes over
        have no gradient. Tiles of 128 queries and 128 keys that it hides are not visited, and those that it shows whole
        carry no mask: which they are is found out from its program, without a look at each pair where that allows it,
        and `explain` says which operations do not. `tile_map` makes that once for many calls; give its result in the
        function's place. Without `query_offset`, comparisons of the indices that are a window are computed as one.
      query_offset: where query 0 stands among the keys; an integer, or an integer array `[*B]` or `[]`. The default 0
        aligns the first query with the first key, as jax.nn does; S - T aligns the last query with the last key. In
        decoding it is the number of keys before query 0: the cache's length before this step. It matters only
        where a position does: to `is_causal`, `local_window_size` and `alibi_slopes`.
      segment_ids: integer `[*B, T]`, or a pair `([*B, T], [*B, S])`: a query sees only keys of its own segment.
        Sorted ids let whole tiles be skipped.
      sinks: floating `[N]`, an extra logit per head that takes part in the softmax, and so in the log-sum-exp, but
        has no value (arXiv:2309.17453).
      dropout_rate: 0 <= rate < 1; drops probabilities and scales the rest by 1 / (1 - rate). It is rounded to the
        nearest multiple of 2**-15 above 0 and below 1; 0 stays 0.
      dropout_key: a JAX random key. The same key drops the same (batch, head, query, key) on every backend, forward
        and backward.
      broadcast_dropout: drop the same for all batch entries and heads, as Flax's layers do.
      precision: how exact the matrix products are, in the terms of `jax.lax.dot_general`. The kernels for NVIDIA GPUs
        split a float32 product into products of bfloat16 pieces: three, more exact than TF32 (None, "default", "high",
        TF32_TF32_F32, BF16_BF16_F32_X3); six, as exact as float32 ("highest", BF16_BF16_F32_X6); or one
        (BF16_BF16_F32). 16-bit operands always take one product.
      deterministic: promise the same bits on every run, which costs speed on some machines.
      sequence_axis: inside `jax.shard_map`, the mesh axes over which T and S are split. Each device passes its chunk
        of query, key, value and `segment_ids`, in the order of the devices; `bias` and `mask` for its own queries and
        all keys. Offsets, lengths and the indices that `score_mod` gets are those of the whole sequences. Leave it out
        in sharded `jit`: there the arrays' shardings decide.
      sequence_strategy: what is done where queries and keys are split over the same devices. "ring" passes keys and
        values round (arXiv:2310.01889), and under causality trades halves so that all devices have as much to do;
        "all_to_all" gives each device whole sequences of some heads (arXiv:2309.14509), and needs K to be a multiple
        of the number of devices; "gather" gives each device all keys and values. None takes the one with the least
        estimated time; `explain` says which.
      page_table: integer `[*B, pages]`, for a paged cache: `key` is `[P, page_size, K, H]` and `value` `[P, page_size,
        K, D]`, or `None` where `key` has both, `[P, page_size, 2 K, H]`, heads key 0, value 0, key 1, value 1, ...
        S is pages * page_size, and key j of an entry is row j % page_size of page `page_table[..., j // page_size]`.
        Needs `key_value_seq_lengths`. Whatever lies past a length, in the table or in the pages, has no effect. No
        derivatives. Pages may also be int8, float8_e4m3fn or float8_e5m2.
      k_scale: multiplies paged keys; a number, or a floating array that broadcasts to `[P, K]`. The product is
        rounded to the query's dtype.
      v_scale: multiplies paged values; a number, or a floating array that broadcasts to `[P, K]`. The product is
        rounded to the query's dtype.
      residual_checkpoint_name: the name of what the backward needs besides the arguments, the output and the
        log-sum-exp, for policies of `jax.checkpoint` that save or offload by name; a pair names the two apart. A policy
        that keeps both spares the backward the forward. Default `jflash.RESIDUAL_CHECKPOINT_NAMES`, the pair
        "jflash_out" and "jflash_lse".

    Returns:
      The output `[*B, T, N, D]` in the query's dtype. With `return_residual`, a pair of the output and the log-sum-exp
      `[*B, T, N]`, a differentiable natural logarithm in float32, or in float64 if the query is. Logits, softmax and
      sums are computed in the log-sum-exp's dtype.

    Raises:
      ValueError: an argument has a wrong shape or value.
      TypeError: an argument is of a wrong kind or dtype, or traced where it must be known.
      NotImplementedError: none of the implementations can serve the call; the message says why for each.

    Warns:
      AttentionWarning: the call is legal and probably not what was meant. Each kind warns once per process.

    Sources: FlashAttention-2 (arXiv:2307.08691); online softmax (arXiv:1805.02867).

    Examples:
      Causal attention of 4 query heads that share 2 key heads, and its gradients.

      >>> import jax, jax.numpy as jnp, jflash
      >>> normal = lambda seed, heads: jax.random.normal(jax.random.key(seed), (2, 64, heads, 16))
      >>> query, key, value = normal(0, 4), normal(1, 2), normal(2, 2)
      >>> jflash.attention(query, key, value, is_causal=True).shape
      (2, 64, 4, 16)
      >>> loss = lambda *arrays: jflash.attention(*arrays, is_causal=True).sum()
      >>> [gradient.shape for gradient in jax.grad(loss, argnums=(0, 1, 2))(query, key, value)]
      [(2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16)]

      Packed sequences: 4 documents of 16 tokens in each batch entry.

      >>> documents = jnp.tile(jnp.repeat(jnp.arange(4), 16), (2, 1))
      >>> out = jflash.attention(query, key, value, is_causal=True, segment_ids=documents)

      Decoding: one query for each batch entry, and a cache of 64 places, of which 39 and 20 were filled before this
      step filled one more. The offset is needed for a window or for several queries at once; one query that sees its
      whole cache does without.

      >>> before = jnp.array([39, 20])
      >>> step = dict(query_offset=before, key_value_seq_lengths=before + 1, is_causal=True, local_window_size=(15, 0))
      >>> jflash.attention(query[:, :1], key, value, **step).shape
      (2, 1, 4, 16)
    """
    names = _dispatch.candidates(implementation)
    return_residual = _arguments.static_bool("return_residual", return_residual)
    remat_names = _autodiff.checkpoint_names(residual_checkpoint_name)
    arguments: dict[str, Any] = dict(
        query=query, key=key, value=value, bias=bias, mask=mask, scale=scale, is_causal=is_causal,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes,
        score_mod=score_mod, mask_mod=mask_mod, query_offset=query_offset, segment_ids=segment_ids, sinks=sinks,
        dropout_rate=dropout_rate, dropout_key=dropout_key, broadcast_dropout=broadcast_dropout, precision=precision,
        deterministic=deterministic,
        sequence_axis=sequence_axis, sequence_strategy=sequence_strategy,
        page_table=page_table, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    arguments = _with_functions_traced(arguments)
    arrays, call = _of_leaves(arguments, jax.Array, lambda arguments: _compute(names, arguments, remat_names))
    mesh = _mesh.explicit_mesh(arrays)
    if mesh is not None:
        automatic: Any = jax.sharding.auto_axes(call, out_sharding=_mesh.following(query, mesh))
        call = automatic
    out, lse = call(arrays)
    return (out, lse) if return_residual else out


def _with_functions_traced(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the same arguments, with the arrays that `score_mod` and `mask_mod` close over among them."""
    cache = _pages.Cache(**{name: arguments.get(name) for name in _pages.Cache.__annotations__})
    cache.check(*map(arguments.get, ("query", "key_value_seq_lengths", "sequence_axis")))
    given = {name: arguments[name] for name in ("score_mod", "mask_mod") if arguments.get(name) is not None}
    for name in given:
        if jax.typeof(arguments["query"]).manual_axis_type.varying:
            raise NotImplementedError(
                f"`{name}` inside jax.shard_map needs jax.shard_map(..., check_vma=False): its program is written for "
                "values that do not differ between devices."
            )
    if "score_mod" in given:
        given["score_mod"] = trace_score_mod(given["score_mod"], widened(arguments["query"].dtype))
    if "mask_mod" in given:
        given["mask_mod"] = _tile_map.traced(given["mask_mod"])
    return {**arguments, **given}


def _of_leaves[Result](
    arguments: dict[str, Any], kind: type, function: Callable[[dict[str, Any]], Result]
) -> tuple[list[Any], Callable[[list[Any]], Result]]:
    """Return the leaves of `arguments` that are of one kind, and `function` as a function of these leaves alone."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda leaf: leaf is None)
    taken = [isinstance(leaf, kind) for leaf in leaves]

    def of_taken(some: list[Any]) -> Result:
        remaining = iter(some)
        merged = [next(remaining) if t else leaf for t, leaf in zip(taken, leaves, strict=True)]
        return function(jax.tree.unflatten(tree, merged))

    return [leaf for t, leaf in zip(taken, leaves, strict=True) if t], of_taken


def _compute(names: _dispatch.Names, arguments: dict[str, Any], remat_names: tuple[str, str]) -> tuple[Array, Array]:
    spec, operands, batch_axes = _canonical.canonicalize(**arguments)
    targets = _platform.lowering_targets(jax.tree.leaves(operands))
    choice = _dispatch.select(spec, names, targets)
    spec, operands = _coverage.with_coverage(choice, spec, operands)
    # An array that is made here is traced inside jax.jit, but not inside jax.grad or jax.vmap.
    is_traced = isinstance(operands.batch_index, Tracer)
    _hints.give(_hints.Call(arguments, spec, names, next(iter(targets.values())), is_traced))
    if _is_empty(spec):
        out = jnp.zeros((spec.batch, spec.query_length, spec.heads, spec.value_dim), spec.dtype)
        lse = jnp.full((spec.batch, spec.heads, spec.query_length), -jnp.inf, spec.accumulator)
    else:
        out, lse = _autodiff.attend(choice, spec, operands, remat_names)
    lse = jnp.swapaxes(lse, 1, 2)
    return out.reshape(*batch_axes, *out.shape[1:]), lse.reshape(*batch_axes, *lse.shape[1:])


def _is_empty(spec: Spec) -> bool:
    """Return whether the call has no output or no key: then no backend is called."""
    return 0 in (spec.batch, spec.query_length, spec.key_length)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    return_residual: bool = False,
    verbose: bool = False,
    **options: Unpack[Options],
) -> str:
    """Say which implementation `attention` would use for these arguments, and why not the others.

    Nothing is computed. The answer is for the platform of the devices that the arrays are committed to, else for that
    of `jax.default_device` or of JAX's first device. Inside `jax.jit` the arrays' devices are not known yet: there
    `attention` chooses when JAX lowers the program.

    Args: explain takes the arguments of `attention`, where arrays may be given as `jax.ShapeDtypeStruct`, and
      `verbose`: whether the implementation also describes what it would launch, and whose derivatives the call has.

    Returns:
      Lines of text: the choice, or that there is none, and an indented line for each implementation that was asked
      before it and refused. If the sequences are split over devices, the strategy for that and its reason follow, and
      the implementation that serves if the choice cannot; then what intervals do not see through in a `mask_mod`, and
      notes of what is probably not meant, or could be faster;
      then the description.

    Raises: explain raises what `attention` raises for arguments that are wrong.

    Example:
      >>> import jax, jax.numpy as jnp, jflash
      >>> arrays = [jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)] * 3
      >>> print(jflash.explain(*arrays, is_causal=True))
      xla serves this call on cpu.
        mosaic_gpu: it needs an NVIDIA Hopper GPU (compute capability 9.0), and this is cpu.
        mosaic_gpu_mma: it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is cpu.
        cudnn: it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is cpu.
      >>> print(jflash.explain(*arrays, implementation="metal", dropout_rate=0.1, dropout_key=jax.random.key(0)))
      No implementation can serve this call on cpu.
        metal: it has no dropout.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {unknown[0]!r}")
    names = _dispatch.candidates(options.pop("implementation", None))
    return_residual = _arguments.static_bool("return_residual", return_residual)
    _autodiff.checkpoint_names(options.pop("residual_checkpoint_name", _autodiff.RESIDUAL_CHECKPOINT_NAMES))
    verbose = _arguments.static_bool("verbose", verbose)
    arguments: dict[str, Any] = dict(query=query, key=key, value=value, bias=bias, mask=mask, **options)
    found: list[Spec] = []
    look = lambda arguments: found.append(_canonical.canonicalize(**_with_functions_traced(arguments))[0])
    shapes, call = _of_leaves(arguments, jax.ShapeDtypeStruct, look)
    jax.eval_shape(call, shapes)
    platform = next(iter(_platform.lowering_targets(jax.tree.leaves(arguments)).values()))
    spec = dataclasses.replace(*found, lse_has_cotangent=return_residual)
    chosen, refusals = _dispatch.ask(spec, names, platform)
    verdict = f"{chosen} serves" if chosen is not None else "No implementation can serve"
    lines = [f"{verdict} this call on {platform}.", *([_dispatch.listing(refusals)] if refusals else [])]
    sequences = _split.described(spec, query, key)
    if sequences is not None:
        whose, others = (None, {}) if chosen is None else _dispatch.ask_split(spec, names, platform, chosen)
        lines.append(f"sequences: {sequences}{f'; by {whose}' if others and whose else ''}")
        lines += [_dispatch.listing(others)] if others else []
    lines += _coverage.lines(spec)
    lines += _hints.lines(_hints.Call(arguments, spec, names, platform, is_traced=True))
    if verbose and chosen is not None and not _is_empty(spec):
        describe = getattr(_dispatch.BACKENDS[chosen], "describe", None)
        lines += [] if describe is None else [describe(spec, platform)]
        lines.append(_dispatch.derivatives(chosen, spec))
    return "\n".join(lines)
