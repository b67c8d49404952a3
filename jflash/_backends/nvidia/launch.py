"""How a kernel is launched, by name, and what kernels with a warpgroup that copies have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jflash._backends.nvidia import smem
from jflash._backends.nvidia.ops import Ops, Ref
from jflash._backends.nvidia.smem import Buffers
from jflash._semantics.spec import Spec

_COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""How all kernels are compiled.

Without a warpgroup's barriers before and after every access to shared memory. They would be needed where a thread reads
what another of its warpgroup wrote, or the other way round. Here only copies and products read what a warpgroup's
threads wrote, or another warpgroup after a barrier of the kernel's own; and only those write what it reads. Copies and
products come after a fence, `plgpu.commit_smem`: it lets them see what was written, and overwrite what was read.
"""

MOST_CTAS = 65_535
"""The most CTAs along a grid's y, and along its z (CUDA C++ Programming Guide, "Compute Capabilities")."""
_ALL = "ctas"
_traced: ContextVar[Mapping[str, int]] = ContextVar("the grid of the kernel that is traced")


def cta_index(axis: str) -> Any:
    """Return, in a kernel, the CTA's index along an axis of its `Launch.grid`."""
    grid = _traced.get()
    if _ALL not in _launched(grid):
        return lax.axis_index(axis)
    names, sizes = list(grid), list(grid.values())
    inner = math.prod(sizes[names.index(axis) + 1 :])
    return lax.rem(lax.div(lax.axis_index(_ALL), inner), grid[axis])


def grid_size(axis: str) -> int:
    """Return, in a kernel, the size of an axis of its `Launch.grid`."""
    return _traced.get()[axis]


def _launched(grid: Mapping[str, int]) -> Mapping[str, int]:
    """Return the grid that Pallas is given.

    Pallas puts the last axis along x, the one before along y, and all others together along z: 64 heads of 1,024 blocks
    are one CTA too many. Such a grid is one axis along x, which ends at 2^31 - 1, in the same order.
    """
    *others, second, _ = 1, 1, *grid.values()
    return grid if max(math.prod(others), second) <= MOST_CTAS else {_ALL: math.prod(grid.values())}


@contextlib.contextmanager
def _tracing(grid: Mapping[str, int]) -> Generator[Mapping[str, int]]:
    """Let `cta_index` and `grid_size` answer for `grid`, and yield what Pallas is given."""
    token = _traced.set(grid)
    try:
        yield _launched(grid)
    finally:
        _traced.reset(token)


class Refs(NamedTuple):
    """A kernel's references, by name."""

    arrays: Mapping[str, Ref]
    """The arrays that it was launched with."""
    results: Mapping[str, Ref]
    smem: Buffers


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's launch but for its arrays."""

    name: str
    grid: Mapping[str, int]
    """The axes' names and sizes; the last is the fastest."""
    results: Mapping[str, jax.ShapeDtypeStruct]
    smem: Buffers = dataclasses.field(default_factory=Buffers)
    warpgroups: int | None = None
    """Warpgroups of a CTA; `None` stands for one, which has no index."""
    cluster: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Axes of the CTAs of a cluster, behind those of the grid, which then counts clusters."""

    def run(self, body: Callable[[Refs], None], arrays: Mapping[str, Any], ops: Ops) -> dict[str, Any]:
        """Launch `body` on arrays, or on references inside `pl.run_state`, and return the results by name."""
        names = tuple(arrays)

        def kernel(*refs: Any) -> None:
            given, made = refs[: len(names)], refs[len(names) : -1]
            shared = smem.opened(refs[-1])
            body(Refs(dict(zip(names, given, strict=True)), dict(zip(self.results, made, strict=True)), shared))

        kernel.__name__ = self.name
        scratch: Any = [smem.in_one_view(self.smem) if ops.interpret else self.smem]
        threads: Any = {} if self.warpgroups is None else dict(num_threads=self.warpgroups, thread_name="warpgroup")
        # Pallas keeps each kernel's references, which the check for leaked tracers takes for a leak.
        with _tracing(self.grid) as ctas, jax.check_tracer_leaks(False):
            run: Any = plgpu.kernel(
                kernel,
                out_type=tuple(self.results.values()),
                grid=tuple(ctas.values()),
                grid_names=tuple(ctas),
                cluster=tuple(self.cluster.values()),
                cluster_names=tuple(self.cluster),
                scratch_types=scratch,
                compiler_params=_COMPILER,
                interpret=ops.interpret,
                **threads,
            )
            return dict(zip(self.results, run(*arrays.values()), strict=True))

    def update(
        self, body: Callable[[Refs], None], arrays: Mapping[str, Array], states: Mapping[str, Array], ops: Ops
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Launch `body` on arrays, and on states that it changes; return the results and the states, by name."""
        if not states:
            return self.run(body, arrays, ops), {}

        def store(refs: Any) -> None:
            results, changed = refs
            made = self.run(body, {**arrays, **changed}, ops)
            for name, ref in results.items():
                ref[...] = made[name]

        # Not `jax.new_ref`, whose effect JAX cannot lower for several devices (0.11 and 0.12).
        unset = {name: jnp.zeros(result.shape, result.dtype) for name, result in self.results.items()}
        return pl.run_state(store)((unset, dict(states)))


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """What a kernel is launched with and what becomes of its results, known from the Spec alone."""

    spec: Spec

    @property
    def launch(self) -> Launch:
        """The kernel's grid, results and shared memory."""
        raise NotImplementedError

    def arrays(self, call: Any) -> dict[str, Array]:
        """Return what the kernel reads of a `Prepared` call, by name."""
        raise NotImplementedError

    def states(self, call: Any) -> dict[str, Array]:
        """Return the arrays that the kernel changes, as they are before it runs, by name."""
        return {}

    def finish(self, made: dict[str, Array], changed: Mapping[str, Array]) -> dict[str, Array]:
        """Return results by name, from what the kernel returned and what became of its states."""
        return made


@dataclasses.dataclass(frozen=True)
class Kernel[Plan: KernelPlan]:
    """A plan, and the class of its CTAs: each warpgroup makes one and runs it."""

    plan: Plan
    cta: Callable[[Plan, Refs, Any], Any]

    def run(self, call: Any) -> dict[str, Array]:
        """Launch the kernel on what was prepared of a call, and return its results by name."""
        plan, ops = self.plan, call.ops
        body = lambda refs: self.cta(plan, refs, ops).run()
        return plan.finish(*plan.launch.update(body, plan.arrays(call), plan.states(call), ops))
