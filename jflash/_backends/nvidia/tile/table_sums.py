"""What a backward's CTAs add up of the gradients of tables that a score_mod reads by position.

    table[index] += dS * d score_mod / d table[index]

Every table has several sums in device memory, among which blocks are dealt, and each warpgroup has one of its own: few
add to one number at a time. In the end they are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.launch import Launch, Refs
from jflash._backends.nvidia.ops import Ops, Ref
from jflash._semantics import score_mod_reads
from jflash._semantics.spec import Spec


@dataclasses.dataclass(frozen=True)
class TableSums:
    """A kernel's, before any array."""

    spec: Spec
    blocks: int
    """Of each head."""
    of_entry: int
    """Sums of each table for a batch entry; 0: another kernel has them."""
    warpgroups: int

    @staticmethod
    def of(spec: Spec, blocks: int, warpgroups: int, processors: int | None) -> TableSums:
        """Those of a kernel whose heads have `blocks`, on a device with `processors` multiprocessors."""
        at_once = pl.cdiv(processors or 1, spec.batch)
        return TableSums(spec, blocks, min(spec.heads * blocks, at_once), warpgroups)

    @staticmethod
    def none(spec: Spec) -> TableSums:
        """Of a kernel that has none."""
        return TableSums(spec, 0, 0, 0)

    @property
    def reads(self) -> tuple[str, ...]:
        """What is differentiated for them, by the names of parameters."""
        return tuple(read.name for read in score_mod_reads.of_tables(self.spec)) if self._tables else ()

    def launch(
        self, launch: Launch, body: Callable[[Refs], None], arrays: Mapping[str, Array], ops: Ops
    ) -> dict[str, Array]:
        """Launch a kernel that changes nothing else; its results, and the tables' gradients."""
        made, changed = launch.update(body, arrays, self.zeros(), ops)
        return made | self.totals(changed)

    def zeros(self) -> dict[str, Array]:
        """What the kernel changes, by d_ and each array's name."""
        place = self.spec.batch, self.of_entry, self.warpgroups
        return {f"d_{name}": jnp.zeros((*place, numbers), jnp.float32) for name, numbers in self._tables.items()}

    def own(self, arrays: Mapping[str, Ref], batch: Any, head: Any, block: Any, warpgroup: Any) -> dict[str, Ref]:
        """A warpgroup's sums, by each array's name."""
        if not self._tables:
            return {}
        place = batch, lax.rem(head * self.blocks + block, self.of_entry), warpgroup
        return {name: arrays[f"d_{name}"].at[place] for name in self._tables}

    def totals(self, changed: Mapping[str, Array]) -> dict[str, Float[Array, "B numbers"]]:
        """The gradients' parts of each batch entry, by d_ and each array's name."""
        return {f"d_{name}": changed[f"d_{name}"].sum(axis=(1, 2)) for name in self._tables}

    @property
    def _tables(self) -> dict[str, int]:
        return score_mod_reads.tables(self.spec) if self.of_entry else {}
