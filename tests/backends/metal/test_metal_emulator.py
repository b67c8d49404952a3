"""The Metal emulator's rules: what it must reject, in which words, and what it must not reject."""

import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import metal_shader
import numpy as np
import pytest
from metal_shader import MISSING, run
from short_run import cover

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
REVERSE = "threadgroup float t[64]; t[thread_index] = x[thread_index]; %s y[thread_index] = t[%s];"
MATRIX = "threadgroup float t[64]; simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); "
ATOMIC = (
    "threadgroup atomic_uint a; if (thread_index == 0) atomic_store_explicit(&a, 1u, memory_order_relaxed);" + BARRIER
)

BROKEN = {
    "write_write": ("y[0] = float(lane); y[thread_index] = 1;", r"race: .* writes byte 0 of buffer\(1\)"),
    "write_write_of_the_same_value": ("y[0] = 1; y[thread_index] = 1;", r"race: .* writes byte 0 of buffer\(1\)"),
    "no_barrier": (REVERSE % ("", "63 - thread_index"), "(race|uninitialised read): .* of t "),
    "no_barrier_before_writing_again": (
        REVERSE % (BARRIER, "thread_index == 0 ? 63 : thread_index") + "t[thread_index] = 0;",
        "race: .* t at .*, which .* (read|wrote) at .*, and no barrier lies between",
    ),
    "barrier_of_the_simdgroup_only": (REVERSE % (SIMD_BARRIER, "63 - thread_index"), "(race|uninitialised read)"),
    "barrier_of_other_memory": (
        REVERSE % ("threadgroup_barrier(mem_flags::mem_device);", "63 - thread_index"),
        "race: .* of t ",
    ),
    "barrier_of_no_memory": (REVERSE % ("threadgroup_barrier(mem_flags::mem_none);", "63 - thread_index"), "race"),
    "device_memory_behind_a_barrier_of_other_memory": (
        f"y[thread_index] = 1; {BARRIER} y[thread_index] = y[63 - thread_index];",
        r"race: .* of buffer\(1\)",
    ),
    "lanes_without_barrier": (REVERSE % ("", "thread_index ^ 1"), "(race|uninitialised read)"),
    "reduction_is_no_barrier": (
        REVERSE % ("float s = simd_sum(1.0f);", "thread_index ^ 1"),
        "race: .* of t ",
    ),
    "matrix_store_then_read": (
        MATRIX + f"if (simdgroup == 0) {{ simdgroup_store(m, t, 8); y[lane] = t[lane]; }} {BARRIER} y[32 + lane] = 0;",
        r"(race|uninitialised read): .* of t at .*:\d+",
    ),
    "matrix_store_then_load": (
        MATRIX + "if (simdgroup == 0) { simdgroup_store(m, t, 8); simdgroup_load(m, t, 8); } y[thread_index] = 0;",
        r"race: .* of t in simdgroup_load at shader.metal:\d+, which a lane of .* wrote in simdgroup_store at shader",
    ),
    "matrix_load_then_store": (
        f"threadgroup float t[64]; t[thread_index] = 1; {BARRIER} simdgroup_float8x8 m;"
        "if (simdgroup == 0) { simdgroup_load(m, t, 8); simdgroup_store(m, t, 8); } y[thread_index] = 0;",
        "race: .* of t in simdgroup_store .* read in simdgroup_load",
    ),
    "past_the_end": (
        "y[thread_index] = x[thread_index + 1];",
        r"out of bounds: .* reads 4 bytes at byte 256 of buffer\(0\)",
    ),
    "before_the_beginning": (
        "y[int(thread_index) - 1] = 0;",
        r"out of bounds: .* writes 4 bytes at byte -4 of buffer\(1\)",
    ),
    "straddling_the_end": (
        "y[thread_index] = 0; if (lane == 31) y[0] = (*(device const packed_float4*)(x + 62)).w;",
        r"out of bounds: .* at byte 260",
    ),
    "far_away": ("y[thread_index] = x[thread_index * 100000000u];", r"out of bounds: .*no buffer"),
    "past_the_parameters": ("y[thread_index] = (&parameter)[1];", r"out of bounds: .* at byte 4 of buffer\(2\)"),
    "from_one_row_into_the_next": (
        f"threadgroup float t[8][8]; t[thread_index / 8][thread_index % 8] = 1; {BARRIER}"
        "y[thread_index] = t[thread_index / 8][thread_index % 8 + 1];",
        r"out of bounds: index 8 of an array at shader.metal:\d+",
    ),
    "from_one_variable_into_the_next": (
        f"threadgroup float t[64]; threadgroup float u[64]; t[thread_index] = u[thread_index] = 1; {BARRIER}"
        "threadgroup float* p = t; y[thread_index] = p[thread_index + 1];",
        "out of bounds: .* at byte 256 of threadgroup variable t",
    ),
    "past_an_array_of_the_thread": (
        "float own[4] = {1, 2, 3, 4}; y[thread_index] = own[thread_index % 8];",
        r"out of bounds: index [4-7] of an array at shader.metal:\d+",
    ),
    "matrix_past_the_end": (
        "simdgroup_float8x8 m; simdgroup_load(m, x + 8, 8); y[thread_index] = 0;",
        r"out of bounds: .* at byte 256 of buffer\(0\), .* in simdgroup_load",
    ),
    "plain_write_after_atomic_load": (
        ATOMIC + "float v = atomic_load_explicit(&a, memory_order_relaxed);"
        "if (thread_index == 5) *(threadgroup uint*)&a = 3; y[thread_index] = v;",
        "race: .* of a ",
    ),
    "plain_read_beside_atomic_add": (
        ATOMIC + "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed); y[thread_index] = *(threadgroup uint*)&a;",
        "race: .* of a ",
    ),
    "operand_written": (
        "((device float*)x)[thread_index] = 1; y[thread_index] = 0;",
        r"write to an operand: .* buffer\(0\)",
    ),
    "uninitialised_threadgroup_memory": (
        "threadgroup float t[64]; y[thread_index] = t[0];",
        "uninitialised read: .* of t",
    ),
    "uninitialised_result": ("y[thread_index] += 1;", r"uninitialised read: .* of buffer\(1\)"),
    "unwritten_result": (
        "if (thread_index != 5) y[thread_index] = 0;",
        r"4 of the 256 bytes of buffer\(1\) .* at byte 20",
    ),
    "barrier_on_two_paths": (
        f"if (simdgroup == 0)\n {BARRIER}\n else\n {BARRIER}\n y[thread_index] = 0;",
        r"divergence: .* threadgroup_barrier at shader.metal:\d+ while others of its group wait in threadgroup_barrier",
    ),
    "barrier_for_some": (f"if (lane < 16) {BARRIER} y[thread_index] = 0;", "deadlock: .*32 threads have ended"),
    "barrier_after_return": (f"y[thread_index] = 0; if (thread_index == 7) return; {BARRIER}", "deadlock: 63 threads"),
    "different_numbers_of_barriers": (
        f"for (uint i = 0; i <= simdgroup; ++i) {BARRIER} y[thread_index] = 0;",
        "deadlock: 32 threads, .* wait in threadgroup_barrier at .*; 32 threads have ended",
    ),
    "reduction_for_some": ("y[thread_index] = lane < 16 ? simd_sum(1.0f) : 0.0f;", "deadlock: .* wait in simd_sum"),
    "reduction_against_barrier": (
        f"float s = 0; if (lane < 16) s = simd_sum(1.0f); else {BARRIER} y[thread_index] = s;",
        r"(divergence|deadlock): .*",
    ),
    "different_reductions": (
        "y[thread_index] = lane < 16 ? simd_sum(1.0f) : simd_max(1.0f);",
        "divergence: .* simd_(sum|max) at .* wait in simd_(sum|max)",
    ),
    "shuffle_from_nowhere": ("y[thread_index] = simd_shuffle(1.0f, ushort(32));", "simd_shuffle .* reads from lane 32"),
    "matrices_from_different_places": (
        "simdgroup_float8x8 m; simdgroup_load(m, x + lane / 16, 4); y[thread_index] = 0;",
        "divergence: the lanes give simdgroup_load at .* different addresses",
    ),
    "too_much_threadgroup_memory": (
        "threadgroup float t[8192]; threadgroup float u[1]; t[thread_index] = u[0] = 0; y[thread_index] = 0;",
        "with `u` the kernel holds 32772 bytes of it; the limit is 32768",
    ),
    "misaligned": (
        "y[thread_index] = (*(device const float4*)(x + 1)).x;",
        r"misaligned: .* byte 4 of buffer\(0\).* a multiple of 16",
    ),
    "no_such_function": (
        "y[thread_index] = fused_softmax(x);",
        "does not compile:\n(.*\n)*.*shader.metal:13.*fused_softmax",
    ),
    "initialised_threadgroup_variable": ("threadgroup float t = 1; y[thread_index] = t;", "cannot be initialised"),
}


@cover(every=4)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name: str) -> None:
    """Under every schedule: detection does not depend on luck."""
    body, message = BROKEN[name]
    for schedule in metal_shader.SCHEDULES:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            run(body, schedules=[schedule])


ENDLESS = {
    "alone": (
        "for (;;) y[thread_index] = 1;",
        r"thread \d+ of .* without waiting for another, the last time at shader",
    ),
    "waiting_for_another": (
        ATOMIC + "while (atomic_load_explicit(&a, memory_order_relaxed) == 1) {} y[thread_index] = 0;",
        r"thread \d+ of .* without waiting for another, the last time (in atomic operation )?at shader",
    ),
    "together": (f"for (;;) {{ y[thread_index] = 1; {BARRIER} }}", "the threadgroup of thread .* 4294967296 times"),
}


@cover(0)
@pytest.mark.parametrize(
    "name",
    [
        *("alone", "waiting_for_another"),
        *(["together"] if hypothesis.settings.get_current_profile_name() == "deep" else []),
    ],
)
def test_endless_loop(name: str) -> None:
    """An endless loop is found; with the deep profile also one that takes minutes to find."""
    body, message = ENDLESS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"a loop without end: {message}"):
        run(body, schedules=[0])


def test_stack_overflow() -> None:
    """Twice, as the first leaves its fiber and its signal handler behind; and what is sound runs on."""
    body = (
        "float own[100000]; for (int i = 0; i < 100000; ++i) own[i] = x[i & 63]; y[thread_index] = own[int(parameter)];"
    )
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"stack overflow: thread \d+ of .* more than 256 KiB"):
            run(body, schedules=[0])
    np.testing.assert_array_equal(run("float own[50000]; own[lane] = 1; y[thread_index] = own[lane];"), 1)


def test_faults_elsewhere_stay_faults() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
import ctypes, metal_shader
metal_shader.run("y[thread_index] = 1;")
print("ran", flush=True)
ctypes.string_at(8)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.stdout == "ran\n"
    assert process.returncode == -signal.SIGSEGV


def test_race_between_threadgroups() -> None:
    """No barrier orders two threadgroups."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"race: .* which another threadgroup wrote"):
        run("y[thread_index] = 1;", grid=(2, 1, 1))


def test_matrices_need_a_whole_simdgroup() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="in a SIMD-group of 16 threads; it takes 32"):
        run(MATRIX + "for (uint i = thread_index; i < 64; i += 48) y[i] = 0;", threads=(48, 1, 1))


SOUND = {
    "barrier": (REVERSE % (BARRIER, "63 - thread_index"), np.arange(64)[::-1]),
    "barrier_of_both": (
        REVERSE % ("threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);", "63 - thread_index"),
        np.arange(64)[::-1],
    ),
    "barrier_of_the_simdgroup": (REVERSE % (SIMD_BARRIER, "thread_index ^ 1"), np.arange(64) ^ 1),
    "the_threads_own_element": (REVERSE % ("", "thread_index"), np.arange(64)),
    "device_memory": (
        "y[thread_index] = x[thread_index]; threadgroup_barrier(mem_flags::mem_device);"
        "float other = y[63 - thread_index]; threadgroup_barrier(mem_flags::mem_device); y[thread_index] = other;",
        np.arange(64)[::-1],
    ),
    "neighbouring_bytes": (
        f"threadgroup uchar t[64]; t[thread_index] = uchar(thread_index); {BARRIER}"
        "y[thread_index] = t[63 - thread_index];",
        np.arange(64)[::-1],
    ),
    "smaller_parts_of_larger_elements": (
        f"threadgroup uint t[16]; ((threadgroup uchar*)t)[thread_index] = uchar(thread_index); {BARRIER}"
        "y[thread_index] = (t[thread_index / 4] >> (8 * (thread_index % 4))) & 255;",
        np.arange(64),
    ),
    "different_barriers_for_different_simdgroups": (
        "threadgroup float t[64]; t[thread_index] = x[thread_index];"
        f"for (uint i = 0; i <= simdgroup; ++i) {SIMD_BARRIER} y[thread_index] = t[thread_index ^ 1];",
        np.arange(64) ^ 1,
    ),
    "atomic_loads_beside_atomic_additions": (
        ATOMIC + "atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);"
        "y[thread_index] = atomic_load_explicit(&a, memory_order_relaxed) > 1;",
        np.ones(64),
    ),
    "all_of_threadgroup_memory": ("threadgroup float t[8192]; t[thread_index] = 1; y[thread_index] = 1;", np.ones(64)),
    "matrix_through_memory": (
        MATRIX
        + f"if (simdgroup == 0) {{ simdgroup_store(m, t, 8); {SIMD_BARRIER} simdgroup_load(m, t, 8); }} {BARRIER}"
        "y[thread_index] = t[thread_index];",
        np.ones(64),
    ),
    "matrix_that_nothing_was_put_in": (
        "threadgroup float t[64]; simdgroup_float8x8 m; if (simdgroup == 0) simdgroup_store(m, t, 8);"
        f"{BARRIER} y[thread_index] = t[thread_index];",
        np.full(64, np.nan),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel(name: str) -> None:
    body, expected = SOUND[name]
    np.testing.assert_array_equal(run(body), expected)


def test_lane_layout_of_matrices_cannot_be_relied_on() -> None:
    """A kernel that does gives other results under other schedules."""
    body = (
        "simdgroup_float8x8 m; simdgroup_load(m, x, 8);"
        "if (simdgroup == 0) { y[2 * lane] = m.thread_elements()[0]; y[2 * lane + 1] = m.thread_elements()[1]; }"
    )
    layouts = [run(body, schedules=[seed]) for seed in range(3)]
    for layout in layouts:
        np.testing.assert_array_equal(np.sort(layout), np.arange(64))
    assert not np.array_equal(layouts[0], layouts[1])
    assert not np.array_equal(layouts[1], layouts[2])
