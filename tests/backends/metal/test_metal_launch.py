"""Launching Metal kernels through XLA: what is bound, checked and counted, and where compiled shaders are kept."""

import concurrent.futures
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from metal_shader import HEADER, KERNEL, MISSING, launch, run

from jflash import _settings
from jflash_metal import _ffi

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_atomics_need_no_barrier_and_aliases_start_with_their_operand() -> None:
    source = (
        HEADER
        + """
kernel void test(device atomic_uint* sums [[buffer(2)]], device atomic_float* total [[buffer(3)]],
                 uint thread_index [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&sums[thread_index % 4], thread_index, memory_order_relaxed);
  atomic_fetch_add_explicit(total, 1.0f, memory_order_relaxed);
}"""
    )
    operands = [np.zeros(4, np.uint32), np.ones(1, np.float32)]
    options = dict(results=[((4,), np.uint32), ((1,), np.float32)], grid=(3, 1, 1), aliases={0: 0, 1: 1})
    sums, total = launch(source, operands, **options)
    np.testing.assert_array_equal(sums, np.arange(192).reshape(-1, 4).sum(0))
    assert total == 193
    plain = source.replace(
        "atomic_fetch_add_explicit(total", "*(device float*)total = 1; atomic_fetch_add_explicit(total"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"race: .* of buffer\(1\)"):
        launch(plain, operands, **options)


def test_counters() -> None:
    """Each figure against what the kernel's text says."""
    body = """
  threadgroup float t[128];
  simdgroup_float8x8 m, sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(m, x, 8);
  for (int i = 0; i < 5; ++i) simdgroup_multiply_accumulate(sums, m, m, sums);
  simdgroup_store(sums, t + 64 * simdgroup, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[thread_index] = exp(simd_max(t[thread_index])) + exp2(parameter) + log(2.0f);"""
    _ffi.forget_counters()
    run(body, schedules=[0])
    (counters,) = _ffi.counters()
    assert counters == _ffi.Counters(
        entry="test",
        threadgroups=1,
        bytes_read=(2 * 64 * 4, 0, 64 * 4),
        bytes_written=(0, 64 * 4, 0),
        threadgroup_bytes_read=64 * 4,
        threadgroup_bytes_written=2 * 64 * 4,
        threadgroup_memory=128 * 4,
        matrix_multiplications=2 * 5,
        exponentials=2 * 64,
        logarithms=64,
        threadgroup_barriers=1,
        simdgroup_barriers=2,
        collectives=2,
        atomics=0,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(entry="other"), "has no kernel of this name"),
        (dict(threads=(1025, 1, 1)), "`threads` must multiply to at most 1024"),
        (dict(threads=(0, 1, 1)), "`threads` must be positive"),
        (dict(grid=(-1, 1, 1)), "`grid` must not be negative"),
        (dict(parameters=bytes(4097)), "at most 4096 bytes"),
    ],
)
def test_launch_is_checked(options: dict, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        launch(KERNEL % "y[0] = 0;", [np.zeros(1, np.float32)], [((1,), np.float32)], **options)


def test_launches_from_several_threads() -> None:
    body = "y[thread_index] = simd_sum(x[thread_index]) * parameter;"
    expected = np.repeat(np.arange(64).reshape(2, 32).sum(1), 32)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for factor, result in enumerate(pool.map(lambda p: run(body, parameter=p, schedules=[0]), range(32))):
            np.testing.assert_array_equal(result, factor * expected)


def test_where_compiled_shaders_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JFLASH_METAL_CACHE", str(tmp_path))
    assert _settings.metal_cache() == tmp_path
    monkeypatch.delenv("JFLASH_METAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _settings.metal_cache() == tmp_path / "jflash" / "metal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _settings.metal_cache() == Path.home() / ".cache" / "jflash" / "metal"


def test_empty_buffers_and_an_empty_grid() -> None:
    """Nothing is launched and nothing is written; a result of some size would count as unwritten."""
    (y,) = launch(KERNEL % "y[thread_index] = 0;", [np.zeros(0, np.float32)], [((0,), np.float32)], grid=(0, 1, 1))
    assert y.shape == (0,)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unwritten result"):
        launch(KERNEL % "y[thread_index] = 0;", [np.zeros(0, np.float32)], [((1,), np.float32)], grid=(0, 1, 1))
