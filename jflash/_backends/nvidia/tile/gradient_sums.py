"""The gradients that a backward kernel sums beside dQ, dK and dV: of parameters along rows, of tables by index.

    sum over a row's elements of dS * d logit / d parameter             one number for each row and head
    table[index] += dS * d score_mod / d table[index]                   for each element of a tile

Every table has several sums in device memory, among which blocks are dealt, and each warpgroup has one of its own, so
that few threads add to one number at a time. The sums are added up after the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.launch import KernelPlan
from jflash._backends.nvidia.ops import Ops, Ref
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._semantics import score_mod_reads
from jflash._semantics.spec import Spec
from jflash._semantics.tile import PARAMETERS

Sums = tuple[Float[Array, "rows"], ...]
"""A warpgroup's sums for one head, one vector for each parameter."""


def wanted_parameters(spec: Spec) -> tuple[str, ...]:
    """Return what is differentiated, by name: operands, and reads of a score_mod with one index for all positions."""
    asked = spec.operands - spec.undifferentiated
    reads = score_mod_reads.summed(spec) if "score_mod_arrays" in asked else []
    return *(name for name in PARAMETERS if name in asked), *(read.name for read in reads)


@dataclasses.dataclass(frozen=True)
class ParameterSums:
    """The parameters whose gradients a kernel sums along the rows of its tiles, by name."""

    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def results(self, *shape: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays that hold the sums, by d_ and each parameter's name."""
        return {f"d_{name}": jax.ShapeDtypeStruct(shape, jnp.float32) for name in self.names}

    def zeros(self, ops: Ops) -> Sums:
        """Return the sums before the first tile of a head."""
        return tuple(ops.full((WARPGROUP_ROWS,), 0) for _ in self.names)

    def of_tile(self, gradients: Mapping[str, Array]) -> Sums:
        """Return the sums of a tile's gradients."""
        return tuple(gradients[name].sum(axis=1) for name in self.names)

    def added(self, sums: Sums, gradients: Mapping[str, Array]) -> Sums:
        """Return the sums with those of a tile's gradients."""
        return tuple(total + gradients[name].sum(axis=1) for name, total in zip(self.names, sums, strict=True))

    def store(self, results: Mapping[str, Ref], sums: Sums, *place: Any) -> None:
        """Store the sums of one head at a place of each result."""
        for name, total in zip(self.names, sums, strict=True):
            results[f"d_{name}"][place] = total


@dataclasses.dataclass(frozen=True)
class TableSums:
    """How a kernel's sums by index are dealt out; by default it has none."""

    spec: Spec
    blocks: int = 0
    """Blocks of each head."""
    of_entry: int = 0
    """Sums of each table for a batch entry; 0 where another kernel has them."""
    warpgroups: int = 0

    @classmethod
    def of(cls, spec: Spec, blocks: int, warpgroups: int, processors: int | None) -> Self:
        """Return the sums of a kernel whose heads have `blocks`, on a device with `processors` multiprocessors."""
        at_once = pl.cdiv(processors or 1, spec.batch)
        return cls(spec, blocks, min(spec.heads * blocks, at_once), warpgroups)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the reads that are differentiated for the sums."""
        return tuple(read.name for read in score_mod_reads.of_tables(self.spec)) if self._tables else ()

    def zeros(self) -> dict[str, Float[Array, "B sums warpgroups numbers"]]:
        """Return the sums before the kernel, by d_ and each array's name."""
        place = self.spec.batch, self.of_entry, self.warpgroups
        return {f"d_{name}": jnp.zeros((*place, numbers), jnp.float32) for name, numbers in self._tables.items()}

    def of_warpgroup(
        self, arrays: Mapping[str, Ref], batch: Any, head: Any, block: Any, warpgroup: Any
    ) -> dict[str, Ref]:
        """Return the sums that a warpgroup adds to, by each array's name."""
        if not self._tables:
            return {}
        place = batch, lax.rem(head * self.blocks + block, self.of_entry), warpgroup
        return {name: arrays[f"d_{name}"].at[place] for name in self._tables}

    def totals(self, changed: Mapping[str, Array]) -> dict[str, Float[Array, "B numbers"]]:
        """Return the gradients' parts of each batch entry, by d_ and each array's name."""
        return {f"d_{name}": changed[f"d_{name}"].sum(axis=(1, 2)) for name in self._tables}

    @property
    def _tables(self) -> dict[str, int]:
        return score_mod_reads.tables(self.spec) if self.of_entry else {}


@dataclasses.dataclass(frozen=True)
class SummingPlan(KernelPlan):
    """A kernel that sums gradients of parameters and of tables."""

    sums: ParameterSums
    tables: TableSums

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The names of parameters and reads that a tile's logits are differentiated by."""
        return *self.sums.names, *self.tables.reads

    def states(self, call: Any) -> dict[str, Array]:
        """Return the tables' sums before the kernel."""
        return self.tables.zeros()

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        """Return the kernel's results with the tables' gradients."""
        return made | self.tables.totals(changed)
