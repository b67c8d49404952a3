"""Forward: online softmax along the walk.

for each block of query rows:
  m, l, O = -inf, 0, 0
  for each tile of keys that it can see:
    S = modify(Q K^T), -inf where masked
    m, l, O = online softmax of S and V
  out = O / l;  lse = m + log l
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash import _dropout, _scores, _softmax, _tile
from jflash._spec import Operands, Spec
from jflash._tile import Corner
from jflash._xla import tiling
from jflash._xla.tiling import Block, Span

Results = tuple[Float[Array, "B T K G D"], Float[Array, "B K G T"]]


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the query's dtype and log-sum-exp in the accumulator's."""
    shape = tiling.plan(spec)
    batch, heads, rows = shape.batch, shape.key_heads, shape.queries
    query = _tile.split_heads(operands.query, 2, spec)
    sinks = None if operands.sinks is None else _tile.split_heads(operands.sinks, 1, spec)

    def attend_block(block: Block, results: Results) -> Results:
        queries = tiling.load_rows(spec, query, block, shape)

        def attend_tile(corner: Corner, span: Span | None, state: _softmax.Rows) -> _softmax.Rows:
            tile = _tile.load(spec, operands, corner, shape)
            keys = tiling.load_keys(operands.key, corner, shape)
            values = tiling.load_keys(operands.value, corner, shape)
            if span is not None and tile.key_lengths is not None:
                index, lengths = tile.key[:, 0, 0, 0, :, None], tile.key_lengths[:, 0]
                keys = tiling.zero_padding(keys, index, lengths)
                values = tiling.zero_padding(values, index, lengths)
            products = tiling.dot(spec, queries.reshape(batch, heads, -1, spec.head_dim), keys, (3, 3))
            logits = _scores.modify(spec, products.reshape(batch, heads, spec.group, rows, shape.keys), tile)
            visible = tiling.visible(spec, tile, span)
            if visible is not None:
                logits = jnp.where(visible, logits, -jnp.inf)

            def weigh(probabilities: Float[Array, "b k g i j"]) -> Float[Array, "b k g i D"]:
                if spec.dropout_rate > 0:
                    probabilities = jnp.where(_dropout.keep(spec, tile), probabilities, 0)
                flat = probabilities.reshape(batch, heads, -1, shape.keys).astype(spec.dtype)
                return tiling.dot(spec, flat, values, (3, 2)).reshape(*logits.shape[:-1], spec.value_dim)

            return _softmax.step(state, logits, weigh)

        state = _softmax.start((batch, heads, spec.group, rows), spec.value_dim, spec.accumulator)
        state = tiling.for_each_tile(spec, operands, shape, block, attend_tile, state)
        block_sinks = None
        if sinks is not None:
            block_sinks = _tile.cut(sinks, (block.batch, block.key_head, 0), (batch, heads, spec.group))[..., None]
        out, lse = _softmax.finish(state, block_sinks)
        if spec.dropout_rate > 0:
            out = out / (1 - spec.dropout_rate)
        return (
            lax.dynamic_update_slice(
                results[0],
                jnp.moveaxis(out.astype(spec.dtype), 3, 1),
                (block.batch, block.first, block.key_head, 0, 0),
            ),
            lax.dynamic_update_slice(results[1], lse, (block.batch, block.key_head, 0, block.first)),
        )

    heads_shape = (spec.key_heads, spec.group)
    results = (
        jnp.zeros((spec.batch, spec.query_length, *heads_shape, spec.value_dim), spec.dtype),
        jnp.zeros((spec.batch, *heads_shape, spec.query_length), spec.accumulator),
    )
    out, lse = tiling.for_each_block(spec, shape, attend_block, results)
    return (
        out.reshape(spec.batch, spec.query_length, spec.heads, spec.value_dim),
        lse.reshape(spec.batch, spec.heads, spec.query_length),
    )
