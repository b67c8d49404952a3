"""`tile_map` makes the map of the tiles that a mask function leaves once, for many calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8

from jflash import _arguments
from jflash._semantics import coverage
from jflash._semantics.mask_mod import MaskMod, MaskModFunction, TracedMaskMod, trace_mask_mod


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileMap:
    """A `mask_mod` with the map of its tiles, as `tile_map` makes it; `attention` takes it in the function's place.

    It is a pytree of arrays, so it may be an argument of `jax.jit`, be carried by `jax.lax.scan` or be captured.

    Example:
      >>> import jflash
      >>> tiles = jflash.tile_map(lambda batch, head, query, key: key <= query, query_length=512, key_length=512)
      >>> print(tiles.tiles[0, 0])
      [[1 0 0 0]
       [2 1 0 0]
       [2 2 1 0]
       [2 2 2 1]]
      >>> print(tiles.visited, tiles.partial)
      0.625 0.25
    """

    arrays: tuple[Array, ...]
    """The arrays that the function closes over."""
    tiles: Int8[Array, "#B #N I J"]
    """For each 128 queries by 128 keys, 0 if no query sees a key, 2 if every query sees every key, else 1."""
    mask_mod: MaskMod = dataclasses.field(metadata=dict(static=True))
    shape: tuple[int, int, int, int] = dataclasses.field(metadata=dict(static=True))
    """The batch entries, heads, queries and keys of the calls that it is for."""

    @property
    def visited(self) -> Array:
        """The share of the tiles that some query sees."""
        return jnp.mean(self.tiles > 0)

    @property
    def partial(self) -> Array:
        """The share of the tiles that are seen in part, for which the function is evaluated."""
        return jnp.mean(self.tiles == 1)


MaskModArgument = MaskModFunction | TileMap


def tile_map(
    mask_mod: MaskModFunction, *, query_length: int, key_length: int, batch: int = 1, heads: int = 1
) -> TileMap:
    """Find which tiles of 128 queries by 128 keys a mask function leaves empty, partial or full.

    `attention(..., mask_mod=f)` finds that out in every call, and XLA does the work of equal calls of one program once.
    A loop over layers, as `jax.lax.scan`, or a step that is called again and again does it each time: there, make the
    map outside and give it in the function's place.

    Args:
      mask_mod: `f(batch, head, query_index, key_index) -> bool`, as for `attention`.
      query_length: T of the calls, T of the whole sequences where they are split over devices.
      key_length: S, the same for the keys.
      batch: how many batch entries the calls have; batch axes count as one. Any number, if f does not look at its
        first argument.
      heads: N, how many query heads they have. Any number, if f does not look at its second argument.

    Returns:
      The map, with the arrays that f closes over. It takes a byte for each tile of each batch entry and head on which
      f depends: 1 MiB for 131,072 tokens.

    Raises:
      ValueError, TypeError: for a wrong `mask_mod`, as `attention` does, or sizes that are not positive integers.

    Example:
      >>> import jax.numpy as jnp, jflash
      >>> documents = jnp.arange(4096) // 1024
      >>> same = lambda batch, head, query, key: (documents[query] == documents[key]) & (key <= query)
      >>> tiles = jflash.tile_map(same, query_length=4096, key_length=4096)
      >>> print(f"{tiles.visited:.1%} visited, {tiles.partial:.1%} in part")
      14.1% visited, 3.1% in part
      >>> query = key = value = jnp.ones((1, 4096, 2, 16))
      >>> jflash.attention(query, key, value, mask_mod=tiles).shape
      (1, 4096, 2, 16)
    """
    size = _arguments.size
    shape = (
        size("batch", batch),
        size("heads", heads),
        size("query_length", query_length),
        size("key_length", key_length),
    )
    traced = trace_mask_mod(mask_mod)
    tiles = coverage.of_mask_mod(traced.mask_mod, traced.arrays, *shape)
    return TileMap(traced.arrays, tiles, traced.mask_mod, shape)


def traced(mask_mod: Any) -> TracedMaskMod:
    """Return a function, or a map of one, as `canonicalize` takes it."""
    if isinstance(mask_mod, TileMap):
        arrays = tuple(map(lax.stop_gradient, mask_mod.arrays))
        return TracedMaskMod(mask_mod.mask_mod, arrays, mask_mod.tiles, mask_mod.shape)
    return trace_mask_mod(mask_mod)
