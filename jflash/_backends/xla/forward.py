"""Forward: online softmax along the walk.

    for each block of query rows:
      m, l, O = -inf, 0, 0
      for each tile of keys that it can see:
        S = modify(Q K^T), -inf where masked
        m, l, O = online softmax of S and V
      out = O / l;  lse = m + log l

Where the norms of queries and keys alone say that no logit of a block can be large (Cauchy-Schwarz), m is that bound
from the start and need not be found tile by tile. Where one tile is the whole call, m is the largest of its logits and
nothing is rescaled. Without sinks P is divided there before it weighs V: XLA makes it of the logits in one kernel, and
the backward's P is the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.xla import plans, tiling
from jflash._backends.xla.plans import Tiles
from jflash._backends.xla.tiling import Block, Span
from jflash._semantics import dropout, online_softmax
from jflash._semantics.dtypes import widened
from jflash._semantics.logits import may_end_in_rounding, modify_logits
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Corner, cut, paste, split_heads

Results = tuple[Float[Array, "B T K G D"], Float[Array, "B K G T"]]
type Step[State] = Callable[[State, Float[Array, "b k g i j"], online_softmax.Weigh], State]


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in the accumulator's."""
    shape = plans.plan(spec, "forward")
    whole = tiling.is_whole(spec, shape)
    batch, heads, rows = shape.batch, shape.key_heads, shape.queries
    query = split_heads(operands.query, 2, spec)
    sinks = None if operands.sinks is None else split_heads(operands.sinks, 1, spec)
    divided = whole and sinks is None
    key_norms = _largest_key_norms(spec, operands) if _may_be_bounded(spec, shape) else None
    lists = tiling.tile_lists(spec, operands, shape)

    def attend_block(block: Block, results: Results) -> Results:
        queries = tiling.load_rows(spec, query, block, shape)
        if operands.query_lengths is not None:
            lengths = cut(operands.query_lengths, (block.batch,), (batch,))
            index = (block.first + jnp.arange(rows)).reshape(*[1] * (queries.ndim - 2), rows, 1)
            queries = tiling.zero_padding(queries, index, lengths.reshape(-1, *[1] * (queries.ndim - 1)))

        def attend_tiles[State](step: Step[State], state: State) -> State:
            def attend_tile(corner: Corner, span: Span | None, state: State) -> State:
                tile = tiling.load_tile(spec, operands, corner, shape)
                keys, values = tiling.load_keys_and_values(spec, operands, corner, shape)
                if span is not None:
                    keys, values = (tiling.zero_padded_keys(array, tile) for array in (keys, values))
                products = tiling.products(spec, shape, queries.reshape(batch, heads, -1, spec.head_dim), keys)
                logits = modify_logits(spec, tiling.pairs(spec, products), tile)
                if whole and may_end_in_rounding(spec):
                    # `online_softmax.exponentials` says why. It comes before the mask, which so takes no extra pass.
                    logits = lax.optimization_barrier(logits)
                visible = tiling.visible(spec, tile, span)
                if visible is not None:
                    logits = jnp.where(visible, logits, -jnp.inf)

                def weigh(probabilities: Float[Array, "b k g i j"]) -> Float[Array, "b k g i D"]:
                    if spec.dropout_rate > 0:
                        probabilities = jnp.where(dropout.keep_tile(spec, tile), probabilities, 0)
                    flat = probabilities.reshape(batch, heads, -1, shape.keys).astype(spec.dtype)
                    return tiling.dot(spec, flat, values, (3, 2)).reshape(*logits.shape[:-1], spec.value_dim)

                return step(state, logits, weigh)

            return tiling.for_each_tile(spec, operands, shape, block, attend_tile, state, lists)

        largest = jnp.full(queries.shape[:-1], -jnp.inf, spec.accumulator)
        unseen = online_softmax.start(largest, spec.value_dim)
        if divided:
            divide = lambda _, logits, weigh: online_softmax.whole_divided(logits, weigh)
            out, lse = attend_tiles(divide, (unseen.weighted, largest))
        else:
            if whole:
                state = attend_tiles(lambda _, logits, weigh: online_softmax.whole(logits, weigh), unseen)
            elif key_norms is None:
                state = attend_tiles(online_softmax.step, unseen)
            else:
                of_keys = cut(key_norms, (block.batch, block.key_head, 0, 0), (batch, heads, 1, 1))
                bound = _norms(queries) * tiling.without_group(spec, of_keys)
                state = lax.cond(
                    jnp.all(bound <= online_softmax.BOUND_LIMIT),
                    lambda: attend_tiles(online_softmax.step_bounded, online_softmax.start(bound, spec.value_dim)),
                    lambda: attend_tiles(online_softmax.step, unseen),
                )
            block_sinks = None
            if sinks is not None:
                block_sinks = cut(sinks, (block.batch, block.key_head, 0), (batch, heads, spec.group))[..., None]
                block_sinks = tiling.without_group(spec, block_sinks)
            out, lse = online_softmax.finish(state, block_sinks)
        out, lse = tiling.with_group(spec, (out, lse))
        out = jnp.moveaxis((out / (1 - spec.dropout_rate)).astype(spec.result_dtype), 3, 1)
        return (
            paste(results[0], out, (block.batch, block.first, block.key_head, 0, 0)),
            paste(results[1], lse, (block.batch, block.key_head, 0, block.first)),
        )

    heads_shape = (spec.key_heads, spec.group)
    results = (
        jnp.zeros((spec.batch, spec.query_length, *heads_shape, spec.value_dim), spec.result_dtype),
        jnp.zeros((spec.batch, *heads_shape, spec.query_length), spec.accumulator),
    )
    out, lse = tiling.for_each_block(spec, operands, shape, attend_block, results)
    return (
        out.reshape(spec.batch, spec.query_length, spec.heads, spec.value_dim),
        lse.reshape(spec.batch, spec.heads, spec.query_length),
    )


def _may_be_bounded(spec: Spec, shape: Tiles) -> bool:
    """Return whether logits are only scaled products, in a dtype with float32's range, and tiles are many enough.

    Pages hold more than a call's keys, so their norms say nothing.
    """
    plain = spec.score_mod is None and not spec.added and {"scale", "page_table"}.isdisjoint(spec.operands)
    many = shape.keys < spec.key_length or (shape.by_passes and not tiling.is_whole(spec, shape))
    return plain and many and jnp.finfo(spec.dtype).maxexp >= 128


def _norms(vectors: Float[Array, "... H"]) -> Float[Array, "..."]:
    wide = vectors.astype(widened(vectors.dtype))
    return jnp.sqrt(jnp.sum(wide * wide, axis=-1))


def _largest_key_norms(spec: Spec, operands: Operands) -> Float[Array, "B K 1 1"]:
    """Return the largest norm of a key, times the scale, for each batch entry and key head."""
    assert spec.scale is not None
    norms = _norms(operands.key)
    if operands.key_lengths is not None:
        inside = jnp.arange(spec.key_length)[None] < operands.key_lengths[:, None]
        norms = jnp.where(inside[:, :, None], norms, 0)
    return (abs(spec.scale) * jnp.max(norms, axis=1))[:, :, None, None]
