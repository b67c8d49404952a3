"""Which CTA adds up which heads' parts of a tile of a bias's gradient.

A bias is shared by batch entries, by heads or by both, and its gradient sums over all that share it. Where there are
fewer tiles than multiprocessors, several CTAs share these sums: each stores its part in float32, and the parts are
summed afterwards. So every sum has one order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.launch import cta_index
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class DbiasSchedule:
    """The tiles, what is summed in each, and its CTAs."""

    shape: tuple[int, int, int, int]
    """The shape of the bias."""
    blocks: int
    """Tiles along the queries."""
    tiles: int
    """Tiles along the keys."""
    heads: int
    """Heads that share one of the bias."""
    visits: int
    """Heads of all batch entries that share one."""
    splits: int = 1
    """CTAs that share the visits of a tile."""

    @classmethod
    def of(cls, spec: Spec, rows: int, keys: int, ctas: int | None) -> Self:
        """Return the schedule for tiles of `rows` by `keys`.

        Where there are fewer than `ctas`, several CTAs share each tile, at most `ctas` in all; with `None` one has it.
        """
        assert spec.bias_shape is not None
        batch, heads, *lengths = spec.bias_shape
        sharing = spec.heads // heads
        blocks, tiles = (pl.cdiv(length, size) for length, size in zip(lengths, (rows, keys), strict=True))
        own = cls(spec.bias_shape, blocks, tiles, sharing, spec.batch // batch * sharing)
        splits = 1 if ctas is None else min(ctas // own.number, own.visits)
        return dataclasses.replace(own, splits=max(1, splits))

    @property
    def number(self) -> int:
        """The number of all tiles."""
        return math.prod(self.shape[:2]) * self.blocks * self.tiles

    @property
    def grid(self) -> dict[str, int]:
        """A grid's axes, without those that place a tile."""
        return dict(head=self.shape[1], batch=self.shape[0]) | ({"split": self.splits} if self.splits > 1 else {})

    def stored(self, spec: Spec, rows: int, keys: int) -> jax.ShapeDtypeStruct:
        """Return what the kernel stores, padded to `rows` and `keys`, with the splits' parts along the batch axis."""
        shape = self.splits * self.shape[0], self.shape[1], rows, keys
        return jax.ShapeDtypeStruct(shape, stored_dtype(spec, self.splits))

    def summed(self, spec: Spec, stored: Float[Array, "parts #N rows keys"]) -> Float[Array, "#B #N T S"]:
        """Return the gradient, in the bias's shape."""
        stored = stored[:, :, : self.shape[2], : self.shape[3]]
        if self.splits == 1:
            return stored
        total = stored.reshape(self.splits, *self.shape).sum(axis=0)
        return total.astype(spec.gradient_dtype(spec.bias_dtype))

    def own_visits(self) -> tuple[Any, Any]:
        """Return, in a kernel, the first visit of a CTA, and how many it has."""
        if self.splits == 1:
            return 0, self.visits
        most = pl.cdiv(self.visits, self.splits)
        first = cta_index("split") * most
        return first, jnp.clip(self.visits - first, 0, most)

    def sharing(self, visit: Any) -> tuple[Any, Any]:
        """Return, in a kernel, the batch entry and the head of a visit."""
        # The bias's own entry and head are added to; only one of the two is not 0.
        batch, head = cta_index("batch"), cta_index("head")
        return batch + lax.div(visit, self.heads), head + lax.rem(visit, self.heads)

    def place(self) -> tuple[Any, Any]:
        """Return, in a kernel, where a CTA stores, by the first two axes."""
        part = 0 if self.splits == 1 else cta_index("split") * self.shape[0]
        return part + cta_index("batch"), cta_index("head")


def stored_dtype(spec: Spec, splits: int) -> Any:
    """Return the dtype that the kernel stores: float32 if each of several CTAs stores a part of the sum."""
    return spec.gradient_dtype(spec.bias_dtype) if splits == 1 else jnp.dtype(jnp.float32)
