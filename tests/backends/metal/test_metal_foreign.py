"""Shaders in the style of other libraries in the emulator, and shaders that mix address spaces."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metal_shader import KERNEL, MISSING, launch, run

from jflash_metal import _ffi

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

FOREIGN = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#define QUIET_FUNCTION [[maybe_unused]] static inline

constant bool has_bias [[function_constant(0)]];
constant int block [[function_constant(1)]];
constant bool never_given [[function_constant(7)]];
constant constexpr const float table[3] = {0.5, 0.25, 2.};

struct Shape { int rows, columns; packed_float2 scales; };

namespace detail {
template <typename T, int N> struct Loader {
  const device T* source;
  thread float sums[N];
  METAL_FUNC void load(uint lane) thread {
#pragma clang loop unroll(full)
    for (short i = 0; i < N; i++) sums[i] += static_cast<float>(source[lane * N + i]);
  }
};
}  // namespace detail

template <typename T>
QUIET_FUNCTION float finish(T value, constant const Shape& shape) {
  return float(value) * shape.scales.x + shape.scales[1];
}

template <typename T, int N, bool Squares = false>
[[kernel, max_total_threads_per_threadgroup(32)]] void row_sums(
    const device T* in,
    device float* out [[buffer(1)]],
    const constant Shape& shape,
    uint3 tid [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]]) {
  detail::Loader<T, N> loader = {in + tid.y * shape.columns, {}};
  for (int i = 0; i < N; ++i) loader.sums[i] = 0;
  loader.load(lane);
  float total = 0;
  for (int i = 0; i < N; ++i) total += Squares ? loader.sums[i] * loader.sums[i] : loader.sums[i];
  total = simd_sum(total);
  if (has_bias) total += table[2] * block;
  if (is_function_constant_defined(never_given)) total = -1;
  if (lane == 0) out[tid.y] = finish(total, shape);
}

#define instantiate(name, type, n) \\
  template [[host_name("row_sums_" #name)]] [[kernel]] void row_sums<type, n>( \\
      const device type* in [[buffer(0)]], device float* out [[buffer(1)]], \\
      const constant Shape& shape [[buffer(2)]], \\
      uint3 tid [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]);
instantiate(half, half, 4)
instantiate(bfloat, bfloat, 2)
template [[host_name("row_squares_float")]] [[kernel]] decltype(row_sums<float, 2, true>) row_sums<float, 2, true>;
"""


@pytest.mark.parametrize(
    ("entry", "dtype", "columns"),
    [("row_sums_half", np.float16, 128), ("row_sums_bfloat", jnp.bfloat16, 64), ("row_squares_float", np.float32, 64)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_foreign_shader(entry: str, dtype: Any, columns: int, has_bias: bool) -> None:
    """Templates and their instantiations by name, function constants, packed vectors, attributes or none, pragmas."""
    constants = f"#pragma METAL_EMULATOR function_constant(0) = {str(has_bias).lower()}\n"
    constants += "#pragma METAL_EMULATOR function_constant(1) = 3\n"
    rows = np.random.default_rng(1).integers(-8, 8, (5, columns)).astype(dtype)
    parameters = np.array([(5, columns, 2, 1)], "i4,i4,f4,f4").tobytes()
    (got,) = launch(
        constants + FOREIGN,
        [rows],
        [((5,), np.float32)],
        entry=entry,
        grid=(1, 5, 1),
        threads=(32, 1, 1),
        parameters=parameters,
    )
    wide = rows.astype(np.float64)
    total = (wide**2 if "squares" in entry else wide).sum(1) + 6 * has_bias
    np.testing.assert_array_equal(got, total * 2 + 1)


MIXED = {
    "threadgroup_as_thread": "threadgroup float t[64]; t[lane] = 0; thread float* p = t; y[lane] = *p;",
    "threadgroup_as_device": "threadgroup float t[64]; t[lane] = 0; y[lane] = 0; y = t;",
    "device_as_threadgroup": "threadgroup const float* p = x; y[lane] = *p;",
    "device_as_constant": "constant float* p = x; y[lane] = *p;",
    "constant_as_device": "device const float* p = &parameter; y[lane] = *p;",
    "thread_as_device": "float own = 1; device float* p = &own; y[lane] = *p;",
    "argument": "y[lane] = [](threadgroup const float* p) { return p[0]; }(x);",
    "cast": "y[lane] = *(threadgroup const float*)static_cast<threadgroup const float*>(x + lane);",
    "atomic_of_a_thread": "atomic_uint own; atomic_fetch_add_explicit(&own, 1u, memory_order_relaxed); y[lane] = 0;",
    "matrix_of_a_thread": "float own[64]; simdgroup_float8x8 m; simdgroup_load(m, own, 8); y[lane] = 0;",
}


@pytest.mark.skipif(not _ffi.clang(), reason="neither clang++ nor zig is installed")
@pytest.mark.parametrize("name", MIXED)
def test_mixed_address_spaces(name: str) -> None:
    """The compiled shader, which has only one address space, would not show them."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="Clang finds in the shader's address spaces:\nshader"):
        run(MIXED[name], schedules=[0], threads=(32, 1, 1), count=32)


@pytest.mark.skipif(not _ffi.clang(), reason="neither clang++ nor zig is installed")
def test_no_check_of_address_spaces_if_the_source_says_so() -> None:
    body = "threadgroup float t[32]; t[lane] = x[lane]; thread float* p = t; y[lane] = p[lane];"
    (y,) = launch(
        "#pragma METAL_EMULATOR no_address_spaces\n" + KERNEL % body,
        [np.arange(32, dtype=np.float32)],
        [((32,), np.float32)],
        threads=(32, 1, 1),
        parameters=bytes(4),
    )
    np.testing.assert_array_equal(y, np.arange(32))


PAIR = """struct Pair {
  float a, b;
  float sum() const { return a + b; }
  float product(float c) const device { return this->a * b * c; }
  float difference() constant { return a - b; }
  void set(float c, float d) threadgroup;
};
kernel void"""


def run_with_pair(body: str) -> np.ndarray:
    (y,) = launch(
        KERNEL.replace("kernel void", PAIR) % body,
        [np.arange(32, dtype=np.float32)],
        [((32,), np.float32)],
        threads=(32, 1, 1),
        parameters=np.float32([2, 5]).tobytes(),
        schedules=[0],
    )
    return y


def test_member_functions_of_each_address_space() -> None:
    y = run_with_pair(
        "device const Pair* p = (device const Pair*)x; constant Pair& q = *(constant Pair*)&parameter;"
        "Pair r = {1, 10}; y[lane] = p->product(3) + p[1].product(1) + q.difference() + r.sum();"
    )
    np.testing.assert_array_equal(y, 0 + 6 - 3 + 11)


@pytest.mark.skipif(not _ffi.clang(), reason="neither clang++ nor zig is installed")
@pytest.mark.parametrize(
    "body",
    [
        "y[lane] = ((device const Pair*)x)->sum();",
        "y[lane] = ((constant Pair*)&parameter)->sum();",
        "Pair own = {1, 10}; y[lane] = own.product(2);",
        "Pair own; own.set(1, 10); y[lane] = own.a;",
    ],
)
def test_member_functions_of_another_address_space(body: str) -> None:
    """One without a qualifier is for structs in thread memory."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="Clang finds in the shader's address spaces:"):
        run_with_pair(body)


def test_vectors_declared_from_parts() -> None:
    functions = "float2 twice(float2 a, float) { return 2 * a; }\nfloat2 unused(float2 a, float b);\nkernel void"
    body = (
        "float2 v(x[lane], float(int2(1, 2).y)); float4 w(v, v), u(1), q(v.yx, 0, 1); const int3 z(0, 0, 5);"
        "twice(v, 2); y[lane] = twice(v, 1).x + w.z + u.w + q.x + z.z;"
    )
    (y,) = launch(
        KERNEL.replace("kernel void", functions) % body,
        [np.arange(32, dtype=np.float32)],
        [((32,), np.float32)],
        threads=(32, 1, 1),
        parameters=bytes(4),
    )
    np.testing.assert_array_equal(y, 3 * np.arange(32) + 1 + 2 + 5)


def test_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "csrc" / "emulator" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    assert "189." in capsys.readouterr().out


def test_a_struct_can_be_copied_out_of_any_address_space() -> None:
    source = KERNEL.replace("kernel void", "struct Pair { float a, b; };\nkernel void") % (
        "threadgroup float shared[64]; shared[lane] = shared[lane + 32] = x[lane];"
        "simdgroup_barrier(mem_flags::mem_threadgroup);"
        "const Pair one = *(device const Pair*)(x + 2); const Pair other = ((threadgroup const Pair*)shared)[2];"
        "y[lane] = one.b * 100 + other.a;"
    )
    (y,) = launch(
        source, [np.arange(32, dtype=np.float32)], [((32,), np.float32)], threads=(32, 1, 1), parameters=bytes(4)
    )
    np.testing.assert_array_equal(y, 304)


def test_function_constant_without_a_value() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="`has_bias` is used and has no value"):
        launch(FOREIGN, [np.zeros((1, 128), np.float16)], [((1,), np.float32)], entry="row_sums_half")
