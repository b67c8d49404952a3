"""Sums over tiles: what a function of one tile gives, added up over the walk, for rows, keys and parameters.

The derivative of such a sum is such a sum again, of the function's vjp. So the gradient of attention, and the
gradient of that gradient, are this one loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jflash._backends.xla import tiling
from jflash._backends.xla.tiling import Block, Span
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Corner, Parameters, Tile, add_parameters, load_parameters, load_tile


class Terms(NamedTuple):
    """Arrays by how a tile takes its part of them; both the arguments of a tile's function and its results."""

    rows: tuple[Array, ...]
    """`[B, T, K, G, ...]`, in a tile `[b, k, g, i, ...]`."""
    keys: tuple[Array, ...]
    """`[B, S, K, ...]`, in a tile `[b, k, j, ...]`."""
    parameters: tuple[Parameters, ...]
    """As `load_parameters` has them."""

    def joined(self, other: Terms) -> Terms:
        """Both, one behind the other."""
        return Terms(self.rows + other.rows, self.keys + other.keys, self.parameters + other.parameters)

    def split(self, like: Terms) -> tuple[Terms, Terms]:
        """What `joined` put together, where the first has as many of each as `like`."""
        rows, keys, parameters = len(like.rows), len(like.keys), len(like.parameters)
        return (
            Terms(self.rows[:rows], self.keys[:keys], self.parameters[:parameters]),
            Terms(self.rows[rows:], self.keys[keys:], self.parameters[parameters:]),
        )


class Place(NamedTuple):
    """Where a tile's function is called: everything that has no derivative."""

    tile: Tile
    visible: Bool[Array, "#b #k #g #i #j"] | None
    fresh: Bool[Array, "i"] | None
    """Rows that count; the others belong to the block before."""


TileFunction = Callable[[Terms, Place], Terms]
"""Of a tile's part of the arguments; its results are parts of the sums."""


def tile_sum(spec: Spec, function: TileFunction, operands: Operands, arguments: Terms) -> Terms:
    """`function` summed over all tiles; its derivative, of any order, goes to `arguments` alone."""

    @jax.custom_vjp
    def call(operands: Operands, arguments: Terms) -> Terms:
        return _walk(spec, function, operands, arguments)

    def pull_back(saved: tuple[Operands, Terms], cotangents: Terms) -> tuple[None, Terms]:
        operands, arguments = saved

        def vjp(both: Terms, place: Place) -> Terms:
            own, theirs = both.split(arguments)
            (terms,) = jax.vjp(lambda own: function(own, place), own)[1](theirs)
            return terms

        return None, tile_sum(spec, vjp, operands, arguments.joined(cotangents))

    call.defvjp(lambda operands, arguments: (call(operands, arguments), (operands, arguments)), pull_back)
    return call(operands, arguments)


def _walk(spec: Spec, function: TileFunction, operands: Operands, arguments: Terms) -> Terms:
    shape = tiling.plan(spec, "backward")

    def parts(corner: Corner, rows: tuple[Array, ...]) -> Terms:
        keys = tuple(tiling.load_keys(array, corner, shape) for array in arguments.keys)
        parameters = tuple(load_parameters(spec, p, corner, shape) for p in arguments.parameters)
        return Terms(rows, keys, parameters)

    def load_block(block: Block) -> tuple[Array, ...]:
        return tuple(tiling.load_rows(spec, array, block, shape) for array in arguments.rows)

    def one(block: Block, corner: Corner, span: Span | None, rows: tuple[Array, ...]) -> Terms:
        tile = load_tile(spec, operands, corner, shape)
        return function(parts(corner, rows), Place(tile, tiling.visible(spec, tile, span), block.fresh))

    def attend_block(block: Block, sums: Terms) -> Terms:
        rows = load_block(block)

        def attend_tile(corner: Corner, span: Span | None, sums: Terms) -> Terms:
            terms = one(block, corner, span, rows)
            return Terms(
                tuple(a + b.astype(a.dtype) for a, b in zip(sums.rows, terms.rows, strict=True)),
                tuple(tiling.add_keys(a, b, corner) for a, b in zip(sums.keys, terms.keys, strict=True)),
                tuple(
                    add_parameters(spec, a, b, corner, shape)
                    for a, b in zip(sums.parameters, terms.parameters, strict=True)
                ),
            )

        zeros = tuple(jnp.zeros(term.shape, spec.accumulator) for term in example.rows)
        found = tiling.for_each_tile(spec, operands, shape, block, attend_tile, sums._replace(rows=zeros))
        return found._replace(
            rows=tuple(tiling.add_rows(a, b, block) for a, b in zip(sums.rows, found.rows, strict=True))
        )

    def kept(whole: Parameters, like: Parameters) -> Parameters:
        """`whole` without what the function gives no sum for."""
        fields: Any = [w if jax.tree.leaves(part) else part for w, part in zip(whole, like, strict=True)]
        return Parameters(*fields)

    def zeros_like(whole: Array) -> Array:
        # A bias of which each element is met once needs no wider sum than itself.
        alone = whole.shape == (spec.batch, spec.heads, spec.query_length, spec.key_length)
        return jnp.zeros(whole.shape, whole.dtype if alone else jnp.promote_types(whole.dtype, spec.accumulator))

    zero = jnp.int32(0)
    origin = Block(zero, zero, zero, None)
    corner = Corner(zero, zero, zero, zero)
    example = jax.eval_shape(lambda: one(origin, corner, None, load_block(origin)))
    sums = Terms(
        tuple(
            jnp.zeros((spec.batch, spec.query_length, spec.key_heads, spec.group, *x.shape[4:]), spec.accumulator)
            for x in example.rows
        ),
        tuple(
            jnp.zeros((spec.batch, spec.key_heads, *x.shape[3:], spec.key_length), spec.accumulator)
            for x in example.keys
        ),
        tuple(
            jax.tree.map(zeros_like, kept(whole, like))
            for whole, like in zip(arguments.parameters, example.parameters, strict=False)
        ),
    )
    sums = tiling.for_each_block(spec, operands, shape, attend_block, sums)
    return sums._replace(keys=tuple(jnp.moveaxis(array, (1, -1), (2, 1)) for array in sums.keys))
