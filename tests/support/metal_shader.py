"""Runs one Metal kernel in the emulator, under several schedules."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jflash_metal import _ffi

SCHEDULES = range(4)
MISSING = _ffi.available() or (None if _ffi.host() == "emulator" else "kernels run on an Apple GPU here, not emulated")
"""Why these tests cannot run."""

HEADER = """
#include <metal_stdlib>
using namespace metal;
"""
KERNEL = (
    HEADER
    + """
kernel void test(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant float& parameter [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  %s
}
"""
)


def launch(
    source: str,
    operands: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    entry: str = "test",
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: tuple[int, int, int] = (64, 1, 1),
    parameters: bytes = b"",
    aliases: Mapping[int, int] | None = None,
    schedules: Sequence[int] = SCHEDULES,
) -> list[np.ndarray]:
    """The results, each given as (shape, dtype), which must be the same under every schedule.

    Raises:
      jax.errors.JaxRuntimeError: if the kernel breaks a rule.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    call = jax.jit(lambda *arrays: _ffi.launch(source, entry, grid, threads, parameters, arrays, shapes, aliases))
    by_schedule = []
    for seed in schedules:
        _ffi.set_schedule(seed)
        by_schedule.append([np.asarray(result) for result in call(*operands)])
    for other in by_schedule[1:]:
        for first, result in zip(by_schedule[0], other, strict=True):
            np.testing.assert_array_equal(first.view(np.uint8), result.view(np.uint8))
    return by_schedule[0]


def run(body: str, *, source: str = KERNEL, count: int = 64, parameter: float = 2.0, **options: Any) -> np.ndarray:
    """Return what the kernel of `source` with this body writes to y [count] where x [count] is 0, 1, 2, ..."""
    (y,) = launch(
        source % body,
        [np.arange(count, dtype=np.float32)],
        [((count,), np.float32)],
        parameters=np.float32(parameter).tobytes(),
        **options,
    )
    return y
