"""The way from operands to the arrays that the kernels bind, and from those, kernel by kernel, to their results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jflash import _mesh, _platform
from jflash._semantics import visits
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash_metal import _ffi
from jflash_metal._blocks import THREADS
from jflash_metal._parameters import with_arrays
from jflash_metal._plan import OPERANDS, Plan
from jflash_metal._tile_lists import tile_lists

BY_CALLBACK = ("mtl",)
"""Platforms whose custom calls are not told of the work before them, and which have host callbacks in its order."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays that a plan's kernels bind: every operand by its name, and the numbers (`Parameters` of
    shaders/parameters.h)."""

    by_name: dict[str, Array]
    parameters: bytes


def prepare(spec: Spec, plan: Plan, operands: Operands, residuals: Residuals | None = None) -> Arrays:
    """Return the arrays as the kernels take them."""
    names = (*OPERANDS, "sinks")
    arrays = {name: array for name, array in operands._asdict().items() if name in names and array is not None}
    if residuals is not None:
        arrays |= residuals._asdict()
    for side in ("query", "key"):
        if f"{side}_segments" in arrays:
            arrays[f"{side}_segment_ranges"] = _ranges(arrays[f"{side}_segments"])
    if visits.has_gaps(spec):
        arrays |= tile_lists(spec, operands)
    # In place of an operand that the call does not have, a kernel binds an array that it does not read.
    placeholders = dict.fromkeys(names, jnp.zeros(1, jnp.int32))
    return Arrays(
        placeholders | arrays, with_arrays(plan.parameters, arrays, 1 if spec.pages is None else spec.pages.size)
    )


def launch(plan: Plan, arrays: Arrays) -> dict[str, Array]:
    """Return every result of the plan's kernels by its name."""
    if _platform.current().name in BY_CALLBACK:
        return _by_callback(plan, arrays)
    source = plan.source()
    results: dict[str, Array] = {}
    for kernel in plan.kernels:
        available = arrays.by_name | results
        bound = [available[name] for name in kernel.operands]
        shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in kernel.results]
        written = _ffi.launch(source, kernel.entry, kernel.grid, (THREADS, 1, 1), arrays.parameters, bound, shapes)
        # Inside shard_map a result differs between devices as the operands do, which a custom call's type does not say.
        written = _mesh.varying_alike(written, like=bound)
        results |= {result.name: array for result, array in zip(kernel.results, written, strict=True)}
    return results


def _by_callback(plan: Plan, arrays: Arrays) -> dict[str, Array]:
    """Return what `launch` does, from one host callback, which the platform runs when the work before it is done.

    Operands are read where the callback is given them. What one kernel writes for the next is copied nowhere; results
    are copied once, by the platform, to where it wants them.
    """
    source = plan.source()
    results = {result.name: result for kernel in plan.kernels for result in kernel.results}
    operands = {
        name: arrays.by_name[name] for kernel in plan.kernels for name in kernel.operands if name not in results
    }

    def run(given: dict[str, Array]) -> dict[str, np.ndarray]:
        written = {name: np.empty(result.shape, result.dtype) for name, result in results.items()}
        available = {name: np.ascontiguousarray(array) for name, array in given.items()} | written
        for kernel in plan.kernels:
            bound = [available[name] for name in kernel.operands]
            own = [written[result.name] for result in kernel.results]
            _ffi.run(source, kernel.entry, kernel.grid, (THREADS, 1, 1), arrays.parameters, bound, own)
        return written

    shapes = {name: jax.ShapeDtypeStruct(result.shape, result.dtype) for name, result in results.items()}
    return _mesh.varying_alike(jax.pure_callback(run, shapes, operands), like=operands)


def _ranges(segments: Int32[Array, "#B L"]) -> Int32[Array, "#B L8 2"]:
    """Return the smallest and the largest segment of each eight in turn."""
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % 8)), mode="edge")
    eights = padded.reshape(segments.shape[0], -1, 8)
    return jnp.stack([eights.min(axis=-1), eights.max(axis=-1)], axis=-1)
