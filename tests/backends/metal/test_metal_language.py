"""The parts of the Metal language that the emulator knows, each against NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from metal_shader import HEADER, MISSING, launch, run
from short_run import cover

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

INDEX = np.arange(64, dtype=np.float32)
EXPRESSIONS: dict[str, tuple[str, Any]] = {
    "literals_are_float": ("1.0 / 3.0 == 1.0f / 3.0f ? 1 : 0", np.ones(64)),
    "half_literals": ("float(1.0h / 3.0h)", np.full(64, np.float16(1) / np.float16(3))),
    "bfloat_literals": ("float(1.25bf) + 1e2 + 0x10", np.full(64, 117.25)),
    "half_arithmetic": ("float(half(x[thread_index]) * half(0.1f))", np.float16(INDEX) * np.float16(0.1)),
    "bfloat_rounds_to_nearest": (
        "float(bfloat(x[thread_index] * 1.37f))",
        np.asarray(jnp.asarray(INDEX * np.float32(1.37)).astype(jnp.bfloat16).astype(jnp.float32)),
    ),
    "swizzles": (
        "[&] { float4 v = float4(x[thread_index], 1, 2, 3); v.yz = v.xw; v.w += v.xy.y;"
        "return v.wzyx[2] * 10 + v.zw[0] + v.w; }()",
        INDEX * 10 + 3 + 3 + INDEX,
    ),
    "vector_arithmetic": (
        "dot(float4(x[thread_index]) * 2 + float4(0, 1, 2, 3), float4(float2(1), float2(0, 1)))",
        3 * 2 * INDEX + 4,
    ),
    "vector_comparison": ("all(int3(1, 2, 3) == int3(1, 2, 3)) && !any(int2(1) < int2(0)) ? 1 : 0", np.ones(64)),
    "vectors_of_half": ("float((half4(half(x[thread_index])) + half4(1, 2, 3, 4)).w)", INDEX + 4),
    "unaligned_vectors": (
        "float3(*(device const packed_float3*)(x + thread_index / 2 * 2 - thread_index / 32 * 2)).y",
        None,
    ),
    "as_type": ("as_type<float>(as_type<uint>(x[thread_index]) | 0x80000000u)", -INDEX),
    "select_clamp_mix": ("select(0.0f, 1.0f, true) + clamp(x[thread_index], 2.0f, 5.0f) + mix(1.0f, 3.0f, 0.5f)", None),
    "fast_and_precise": ("fast::exp2(3.0f) + precise::exp2(1.0f) + exp2(0.0f)", np.full(64, 11.0)),
    "maximum_ignores_nan": ("max(NAN, x[thread_index]) + fmin(INFINITY, 1.0f)", INDEX + 1),
    "integers": ("popcount(uint(thread_index)) + clz(1u) + ctz(8u) + mulhi(1u << 31, 4u)", None),
    "limits": ("numeric_limits<half>::max() + float(numeric_limits<int>::max() == 2147483647)", np.full(64, 65505.0)),
    "simd_sum": ("simd_sum(x[thread_index])", np.repeat(INDEX.reshape(2, 32).sum(1), 32)),
    "simd_product": ("simd_product(lane < 4 ? 2.0f : 1.0f)", np.full(64, 16)),
    "simd_min_and_max": ("simd_max(int(lane)) - simd_min(x[thread_index])", 31 - INDEX // 32 * 32),
    "simd_sum_of_vectors": ("simd_sum(float2(1, x[thread_index])).y", np.repeat(INDEX.reshape(2, 32).sum(1), 32)),
    "simd_sum_of_half": ("float(simd_sum(half(lane)))", np.full(64, 496)),
    "bitwise_reductions": (
        "simd_or(1u << lane) == ~0u && simd_and(lane | 32u) == 32u && simd_xor(lane) == 0",
        np.ones(64),
    ),
    "prefix_sums": (
        "simd_prefix_inclusive_sum(x[thread_index]) - simd_prefix_exclusive_sum(x[thread_index])",
        INDEX,
    ),
    "shuffle": ("simd_shuffle(x[thread_index], ushort(31 - lane))", INDEX.reshape(2, 32)[:, ::-1].ravel()),
    "shuffle_xor": ("simd_shuffle_xor(x[thread_index], 5)", np.arange(64) ^ 5),
    "shuffle_down_keeps_the_last": (
        "simd_shuffle_down(x[thread_index], 3)",
        np.where(INDEX % 32 < 29, INDEX + 3, INDEX),
    ),
    "shuffle_up_keeps_the_first": ("simd_shuffle_up(x[thread_index], 3)", np.where(INDEX % 32 > 2, INDEX - 3, INDEX)),
    "rotate": ("simd_shuffle_rotate_down(x[thread_index], 1)", INDEX // 32 * 32 + (INDEX + 1) % 32),
    "broadcast": ("simd_broadcast(x[thread_index], 7) + simd_broadcast_first(0.5f)", INDEX // 32 * 32 + 7.5),
    "votes": ("simd_any(lane == 3) && !simd_all(lane == 3) && ulong(simd_ballot(lane < 4)) == 15", np.ones(64)),
    "quads": ("quad_sum(x[thread_index]) - quad_max(x[thread_index])", None),
}
EXPECTED = {
    "unaligned_vectors": np.minimum(INDEX // 2 * 2 - INDEX // 32 * 2 + 1, 63),
    "select_clamp_mix": 1 + np.clip(INDEX, 2, 5) + 2,
    "integers": np.array([i.bit_count() + 31 + 3 + 2 for i in range(64)]),
    "quads": INDEX.reshape(-1, 4).sum(1).repeat(4) - INDEX.reshape(-1, 4).max(1).repeat(4),
}


@cover(every=4)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expression(name: str) -> None:
    expression, expected = EXPRESSIONS[name]
    expected = EXPECTED[name] if expected is None else expected
    np.testing.assert_array_equal(run(f"y[thread_index] = {expression};"), np.asarray(expected, np.float32))


@cover(every=5)
@pytest.mark.parametrize("function", ["exp", "exp2", "log", "log2", "tanh", "sqrt", "rsqrt", "sin", "floor", "rint"])
def test_elementary_function(function: str) -> None:
    expected = {"rsqrt": lambda x: 1 / np.sqrt(x)}.get(function, getattr(np, function, None))(INDEX / 16 + 0.1)
    got = run(f"y[thread_index] = {function}(x[thread_index] / 16 + 0.1f);")
    np.testing.assert_allclose(got, expected, rtol=3e-7)


@pytest.mark.parametrize(("name", "dtype"), [("float", np.float32), ("half", np.float16), ("bfloat", jnp.bfloat16)])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_product(name: str, dtype: Any, transposed: bool) -> None:
    """D = A B + C with a wide row, an origin, and A transposed or not; sums in float32."""
    source = (
        HEADER
        + f"""
kernel void test(device const {name}* a [[buffer(0)]], device const {name}* b [[buffer(1)]],
                 device float* d [[buffer(2)]]) {{
  simdgroup_matrix<{name}, 8, 8> left, right;
  simdgroup_load(left, a, 24, ulong2(8, 2), {str(transposed).lower()});
  simdgroup_load(right, b, 8);
  simdgroup_float8x8 sums = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  simdgroup_multiply_accumulate(sums, left, right, sums);
  simdgroup_store(sums, d, 8);
}}"""
    )
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(dtype) for shape in ((12, 24), (8, 8)))
    (d,) = launch(source, [a, b], [((8, 8), np.float32)], threads=(32, 1, 1))
    left = a[2:10, 8:16].astype(np.float64)
    expected = (left.T if transposed else left) @ b.astype(np.float64) + 0.5
    np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), [("half", np.float16), ("bfloat", jnp.bfloat16)])
def test_every_narrow_number(name: str, dtype: Any) -> None:
    """Through a matrix, which is the emulator's own conversion, and through a variable, which is the compiler's."""
    source = (
        HEADER
        + f"""
kernel void test(device const {name}* x [[buffer(0)]], device {name}* through_matrix [[buffer(1)]],
                 device float* widened [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                 uint lane [[thread_index_in_simdgroup]]) {{
  simdgroup_matrix<{name}, 8, 8> m;
  simdgroup_load(m, x + 64 * group, 8);
  simdgroup_store(m, through_matrix + 64 * group, 8);
  for (uint i = 64 * group + lane; i < 64 * group + 64; i += 32) widened[i] = float(x[i]);
}}"""
    )
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    through, widened = launch(
        source,
        [every],
        [((65536,), dtype), ((65536,), np.float32)],
        grid=(1024, 1, 1),
        threads=(32, 1, 1),
        schedules=[0],
    )
    np.testing.assert_array_equal(through.astype(np.float32), every.astype(np.float32))
    np.testing.assert_array_equal(widened, every.astype(np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("half", np.float16), ("bfloat", jnp.bfloat16)])
def test_rounding_to_narrow_numbers(name: str, dtype: Any) -> None:
    """Midpoints, their neighbours, subnormals, overflow, infinities."""
    source = (
        HEADER
        + f"""
kernel void test(device const float* x [[buffer(0)]], device {name}* by_lane [[buffer(1)]],
                 device {name}* by_sum [[buffer(2)]], uint i [[thread_position_in_grid]]) {{
  by_lane[i] = {name}(x[i]);
  by_sum[i] = simd_sum({name}(x[i]));
}}"""
    )
    tops = np.arange(0, 32768, 7, dtype=np.uint16).view(dtype).astype(np.float32)
    tops = tops[np.isfinite(tops)]
    middles = tops[:-1] + (tops[1:] - tops[:-1]) / 2
    x = np.concatenate([tops, middles, np.nextafter(middles, np.float32(np.inf)), -middles, [np.inf, 7e4, 3.4e38]])
    x = x.astype(np.float32)
    by_lane, by_sum = launch(
        source,
        [x],
        [(x.shape, dtype)] * 2,
        grid=(x.size, 1, 1),
        threads=(1, 1, 1),
        schedules=[0],
    )
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    np.testing.assert_array_equal(by_lane.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(by_sum.astype(np.float32), expected.astype(np.float32))


def test_positions_and_sizes() -> None:
    """Every built-in that says where a thread is, in each of its types."""
    source = (
        HEADER
        + """
kernel void test(device uint* out [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
    ushort2 group [[threadgroup_position_in_grid]], uint3 local [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
    uint2 all [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint width [[thread_execution_width]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  bool right = grid.x == group.x * threads.x + local.x && grid.y == group.y * threads.y + local.y && grid.z == local.z;
  right = right && index == local.x + threads.x * (local.y + threads.y * local.z) && lane == index % width;
  right = right && simdgroup == index / width && width == 32 && simdgroups == 2 && threads.z == 2;
  right = right && groups.x == 3 && groups.y == 2 && all.x == threads.x * 3 && all.y == threads.y * 2;
  out[grid.x + all.x * (grid.y + all.y * grid.z)] = right;
}"""
    )
    (out,) = launch(source, [], [((2, 10, 12), np.uint32)], grid=(3, 2, 1), threads=(4, 5, 2))
    np.testing.assert_array_equal(out, 1)
