"""How a kernel is launched: grid, results and shared memory by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jflash._backends.mosaic_gpu.hardware.smem import Buffers
from jflash._backends.mosaic_gpu.hardware.warpgroup import Ref, WarpgroupOps

_COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)
"""How all kernels are compiled.

Without a warpgroup's barriers before and after every access to shared memory. They would be needed where a thread reads
what another of its warpgroup wrote, or the other way round. Here only copies and products read what a warpgroup's
threads wrote, or another warpgroup after a barrier of the kernel's own; and only those write what it reads. Copies and
products come after a fence, `plgpu.commit_smem`: it lets them see what was written, and overwrite what was read.
"""


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
    """Of a CTA; `None`: one, which has no index."""

    def run(self, body: Callable[[Refs], None], arrays: Mapping[str, Any], ops: WarpgroupOps) -> dict[str, Any]:
        """Launch `body` on arrays, or on references inside `pl.run_state`; the results by name."""

        def kernel(*all_refs: Any) -> None:
            *refs, smem = all_refs
            named = dict(zip([*arrays, *self.results], refs, strict=True))
            body(Refs({name: named[name] for name in arrays}, {name: named[name] for name in self.results}, smem))

        kernel.__name__ = self.name
        scratch: Any = [self.smem]
        threads: Any = {} if self.warpgroups is None else dict(num_threads=self.warpgroups, thread_name="warpgroup")
        run: Any = plgpu.kernel(
            kernel,
            out_type=tuple(self.results.values()),
            grid=tuple(self.grid.values()),
            grid_names=tuple(self.grid),
            scratch_types=scratch,
            compiler_params=_COMPILER,
            interpret=ops.interpret,
            **threads,
        )
        return dict(zip(self.results, run(*arrays.values()), strict=True))
