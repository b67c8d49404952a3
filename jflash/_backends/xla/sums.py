"""Sums over tiles: what a function of one tile gives, added up over the walk, for rows, keys and parameters.

The derivative of such a sum is such a sum again: of the function's tangent, or of its transpose. So the gradient of
attention, its tangent, and the derivatives of both are this one loop, with as many steps as there are tiles to visit.
JAX alone could not transpose such a loop.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jflash import _primitive
from jflash._backends.xla import tiling
from jflash._backends.xla.plans import Tiles
from jflash._backends.xla.tiling import Block, Span
from jflash._choice import Program
from jflash._semantics.dtypes import widened
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import (
    PARAMETERS,
    Corner,
    Parameters,
    Tile,
    tile_parameters,
)


class Terms(NamedTuple):
    """Arrays by how a tile takes its part of them: the arguments of a tile's function, and its results.

    `None` stands for an array that is not there, such as a tangent of 0.
    """

    rows: tuple[Any, ...]
    """Arrays `[B, T, K, G, ...]`, of which a tile takes `[b, k, g, i, ...]`."""
    keys: tuple[Any, ...]
    """Arrays `[B, S, K, ...]`, of which a tile takes `[b, k, j, ...]`."""
    parameters: tuple[Parameters, ...]
    """Parameters, of which a tile takes what `load_parameters` gives."""

    def joined(self, other: Terms) -> Terms:
        """Return the arrays of both, this one's first."""
        return Terms(self.rows + other.rows, self.keys + other.keys, self.parameters + other.parameters)

    def split(self, counts: tuple[int, int, int]) -> tuple[Terms, Terms]:
        """Return the two that `joined` put together, given how many arrays of each kind the first has."""
        parts = [(terms[:count], terms[count:]) for terms, count in zip(self, counts, strict=True)]
        first, second = zip(*parts, strict=True)
        return Terms(*first), Terms(*second)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of arrays of each kind."""
        return len(self.rows), len(self.keys), len(self.parameters)


class Place(NamedTuple):
    """Everything about the place of a tile that has no derivative."""

    tile: Tile
    visible: Bool[Array, "#b #k #g #i #j"] | None
    fresh: Bool[Array, "i"] | None
    """True for rows that count; the others belong to the block before."""
    whole_rows: bool
    """Whether the tile has all keys of its rows."""
    shape: Tiles


class TileFunction(Protocol):
    """A function of a tile's part of the arguments, whose results are parts of the sums. It is hashable, as a primitive
    is."""

    def __call__(self, terms: Terms, place: Place, /) -> Terms:
        """Return the terms that one tile adds."""
        ...


def tile_sum(spec: Spec, shape: Tiles, function: TileFunction, operands: Operands, arguments: Terms) -> Terms:
    """Return `function` summed over all tiles; its derivative, of any order and mode, goes to `arguments` alone."""
    return _primitive.perform(_TileSum(spec, shape, function), operands, arguments)


@dataclasses.dataclass(frozen=True)
class _TileSum:
    """The operation behind `tile_sum`, with its derivatives."""

    spec: Spec
    shape: Tiles
    function: TileFunction
    choice = None
    sums = True
    own = _primitive.OWN
    tokens = None

    def form_if_untraced(self, args: Any) -> None:
        """Return `None`: the form is known from the tile function's program alone."""

    def __call__(self, program: Program | None, args: Any) -> Terms:
        operands, arguments = args
        return _Walk(self.spec.resized(operands), self.shape, self.function, operands, arguments).total()

    def tangents(self, args: Any, results: Terms, tangents: Any) -> Terms:
        (operands, arguments), (_, pushed) = args, tangents
        if not jax.tree.leaves(pushed):
            return jax.tree.map(lambda _: None, results)
        function = _Pushed(self.function, arguments.counts)
        return tile_sum(self.spec, self.shape, function, operands, arguments.joined(pushed))

    def transpose(self, args: Any, cotangents: Terms) -> Any:
        operands, arguments = args
        leaves, tree = jax.tree.flatten(arguments)
        linear = tuple(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        # Only the shapes of the linear arguments are asked for.
        given = tree.unflatten([jnp.zeros(x.shape, x.dtype) if l else x for x, l in zip(leaves, linear, strict=True)])
        function = _Transposed(self.function, arguments.counts, linear)
        sums = tile_sum(self.spec, self.shape, function, operands, given.joined(_primitive.with_zeros(cotangents)))
        found = [
            total.astype(x.dtype) if l else None
            for x, total, l in zip(leaves, tree.flatten_up_to(sums), linear, strict=True)
        ]
        return jax.tree.map(lambda _: None, operands), tree.unflatten(found)


@dataclasses.dataclass(frozen=True)
class _Pushed:
    """The tangents of `function`. Its arguments are `function`'s, followed by their tangents."""

    function: TileFunction
    counts: tuple[int, int, int]

    def __call__(self, terms: Terms, place: Place) -> Terms:
        own, tangents = terms.split(self.counts)
        return _primitive.tangents_of(lambda own: self.function(own, place), (own,), (tangents,))


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """The transpose of `function` in its `linear` arguments. Its arguments are `function`'s, followed by the
    cotangents."""

    function: TileFunction
    counts: tuple[int, int, int]
    linear: tuple[bool, ...]

    def __call__(self, terms: Terms, place: Place) -> Terms:
        own, cotangents = terms.split(self.counts)
        leaves, tree = jax.tree.flatten(own)

        def of_linear(*some: Array) -> Terms:
            given = iter(some)
            return self.function(
                tree.unflatten([next(given) if l else leaf for leaf, l in zip(leaves, self.linear, strict=True)]), place
            )

        some = [leaf for leaf, l in zip(leaves, self.linear, strict=True) if l]
        results = jax.eval_shape(of_linear, *some)
        typed = jax.tree.map(lambda result, cotangent: cotangent.astype(result.dtype), results, cotangents)
        found = iter(jax.linear_transpose(of_linear, *some)(typed))
        return tree.unflatten([next(found) if l else None for l in self.linear])


@dataclasses.dataclass(frozen=True)
class _Walk:
    """One `tile_sum` while it is computed."""

    spec: Spec
    shape: Tiles
    function: TileFunction
    operands: Operands
    arguments: Terms

    def total(self) -> Terms:
        """Return the sums over all tiles."""
        zero = jnp.int32(0)
        lists = tiling.tile_lists(self.spec, self.operands, self.shape)
        example = jax.eval_shape(
            lambda block: self._terms(block, Corner(zero, zero, zero, zero), None, self._rows(block)),
            Block(zero, zero, zero, None),
        )

        def add_block(block: Block, sums: Terms) -> Terms:
            rows = self._rows(block)

            def add_tile(corner: Corner, span: Span | None, sums: Terms) -> Terms:
                terms = self._terms(block, corner, span, rows)
                parameters = [
                    tiling.add_parameters(self.spec, total, part, corner, self.shape)
                    for total, part in zip(sums.parameters, terms.parameters, strict=True)
                ]
                return Terms(
                    jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums.rows, terms.rows),
                    jax.tree.map(lambda total, part: tiling.add_keys(total, part, corner), sums.keys, terms.keys),
                    tuple(parameters),
                )

            zeros = jax.tree.map(lambda part: jnp.zeros(part.shape, self.spec.accumulator), example.rows)
            of_block = sums._replace(rows=zeros)
            found = tiling.for_each_tile(self.spec, self.operands, self.shape, block, add_tile, of_block, lists)
            add = lambda total, part: tiling.add_rows(self.spec, total, part, block)
            return found._replace(rows=jax.tree.map(add, sums.rows, found.rows))

        sums = tiling.for_each_block(self.spec, self.operands, self.shape, add_block, self._zeros(example))
        return sums._replace(keys=jax.tree.map(lambda array: jnp.moveaxis(array, (1, -1), (2, 1)), sums.keys))

    def _rows(self, block: Block) -> tuple[Any, ...]:
        return jax.tree.map(lambda array: tiling.load_rows(self.spec, array, block, self.shape), self.arguments.rows)

    def _terms(self, block: Block, corner: Corner, span: Span | None, rows: tuple[Any, ...]) -> Terms:
        """Return the terms that one tile adds."""
        spec, shape = self.spec, self.shape
        keys = jax.tree.map(lambda array: tiling.load_keys(array, corner, shape), self.arguments.keys)
        parameters = tuple(tiling.load_parameters(spec, whole, corner, shape) for whole in self.arguments.parameters)
        tile = tiling.load_tile(spec, self.operands, corner, shape)
        place = Place(tile, tiling.visible(spec, tile, span), block.fresh, tiling.holds_rows(spec, shape), shape)
        return self.function(Terms(rows, keys, parameters), place)

    def _zeros(self, example: Terms) -> Terms:
        """Return zeros of the shapes of all sums."""
        spec, dtype = self.spec, self.spec.accumulator
        by_row = (spec.batch, spec.query_length, spec.key_heads, spec.group)

        def of_parameter(part: Array | None, whole: Array | None) -> Array | None:
            if part is None or whole is None:
                return None
            # A bias whose every element is met once, in this call and besides it, needs no wider sum than itself.
            alone = whole.shape == (spec.batch, spec.heads, spec.query_length, spec.key_length) and not spec.partial
            return jnp.zeros(whole.shape, whole.dtype if alone else widened(whole.dtype, dtype))

        def of_parameters(parts: Parameters) -> Parameters:
            whole = tile_parameters(self.operands)
            sums = {name: of_parameter(getattr(parts, name), getattr(whole, name)) for name in PARAMETERS}
            # None of them has a part where no parameter moves.
            captured = tuple(map(of_parameter, parts.score_mod_arrays, whole.score_mod_arrays))
            return Parameters(**sums, score_mod_arrays=captured)

        return Terms(
            jax.tree.map(
                lambda part: jnp.zeros((*by_row, *part.shape[tiling.axes_of_rows(spec) :]), dtype), example.rows
            ),
            jax.tree.map(
                lambda part: jnp.zeros((spec.batch, spec.key_heads, *part.shape[3:], spec.key_length), dtype),
                example.keys,
            ),
            tuple(map(of_parameters, example.parameters)),
        )
