"""Which blocks of queries a CTA takes that keeps sums from one to the next.

A batch entry has a number of CTAs for the blocks of all its heads. They take them in turns, the last blocks of all
heads first: causal, these are the longest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """The blocks of a batch entry, and its CTAs."""

    heads: int
    blocks: int
    """Of each head."""
    ctas: int

    @staticmethod
    def of(heads: int, blocks: int, batch: int, ctas: int | None) -> HeadBlocks:
        """With about `ctas` for all batch entries; `None`: as many as there are blocks."""
        every = heads * blocks
        return HeadBlocks(heads, blocks, every if ctas is None else max(1, min(every, pl.cdiv(ctas, batch))))

    def count(self, cta: Any) -> Any:
        """How many a CTA takes."""
        return lax.div(self.heads * self.blocks - cta + self.ctas - 1, self.ctas)

    def block(self, cta: Any, index: Any) -> tuple[Any, Any]:
        """The head and the block that a CTA takes after `index` others."""
        number = cta + index * self.ctas
        return lax.rem(number, self.heads), self.blocks - 1 - lax.div(number, self.heads)
