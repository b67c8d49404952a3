"""A kernel in the style of others that rely on Apple's lane layout of matrices, in the emulator.

That such kernels, which run right on Apple's GPUs, are right here too is evidence that the emulator means what Metal
means. The kernel is tests/support/guest_attention.metal.
"""

import math
import re
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np
import oracle
import pytest
from cases import Case
from metal_shader import KERNEL, MISSING, launch, run

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

GUEST = (Path(__file__).parents[2] / "support" / "guest_attention.metal").read_text()
APPLE = "#pragma METAL_EMULATOR matrix_layout(apple)\n"
CALLS = {
    "head_dim_64": Case(query_length=64, key_length=48, heads=(2, 2), dims=(64, 64), batch=(1,)),
    "head_dim_128_grouped": Case(query_length=32, key_length=64, heads=(4, 2), dims=(128, 128), batch=(2,)),
    "causal_ragged": Case(query_length=45, key_length=45, heads=(2, 1), dims=(64, 64), batch=(1,), causal=True),
    "half_masked": Case(
        dtype="float16", query_length=37, key_length=50, heads=(2, 1), dims=(64, 64), batch=(2,), mask="full"
    ),
}


def attend(call: oracle.Call, source: str = GUEST, layout: str = APPLE, **options: Any) -> np.ndarray:
    """The guest's output for a call, in the call's dtype."""
    batch, queries, heads, head_dim = call.query.shape
    keys, key_heads = call.key.shape[1:3]
    constants = {10: keys % 16 == 0, 11: call.is_causal, 12: call.mask is not None}
    pragmas = [f"#pragma METAL_EMULATOR function_constant({n}) = {str(on).lower()}\n" for n, on in constants.items()]
    scale = math.log2(math.e) / math.sqrt(head_dim)
    mask = np.zeros(1, bool) if call.mask is None else np.broadcast_to(call.mask, (batch, heads, queries, keys))
    (out,) = launch(
        layout + "".join(pragmas) + source,
        [call.query, call.key, call.value, mask],
        [(call.query.shape, call.query.dtype)],
        entry=f"attend_{'half' if call.query.dtype == np.float16 else 'float'}_{head_dim}",
        grid=(-(-queries // 32), heads, batch),
        threads=(32, 4, 1),
        parameters=np.array([(queries, keys, heads, heads // key_heads, scale)], "i4,i4,i4,i4,f4").tobytes(),
        **options,
    )
    return out


def error_of(out: np.ndarray, call: oracle.Call) -> tuple[float, float]:
    """The error, and the one that is allowed."""
    return oracle.error(out, oracle.exact(call).out), oracle.tolerances(call).out


@pytest.mark.parametrize("name", CALLS)
def test_guest_is_right(name: str) -> None:
    call = cases.build(CALLS[name])
    error, allowed = error_of(attend(call, schedules=[0, 1]), call)
    assert error <= allowed


def test_guest_is_wrong_in_the_random_layout() -> None:
    """The shader gets the random layout without the pragma: so a kernel that relies on a layout has to say so."""
    call = cases.build(CALLS["causal_ragged"])
    for schedule in range(3):
        error, allowed = error_of(attend(call, layout="", schedules=[schedule]), call)
        assert error > 100 * allowed


def test_apple_layout() -> None:
    """Lane by lane, from the formulas of the known layout."""
    body = (
        "simdgroup_float8x8 m; simdgroup_load(m, x, 8);"
        "if (simdgroup == 0) { y[2 * lane] = m.thread_elements()[0]; y[2 * lane + 1] = m.thread_elements()[1]; }"
    )
    lane = np.arange(32)
    quad = lane // 4
    row, column = (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2
    expected = np.stack([row * 8 + column, row * 8 + column + 1], axis=1).ravel()
    np.testing.assert_array_equal(run(body, source=APPLE + KERNEL), expected)


def test_a_buffer_whose_function_constant_is_false_is_not_bound() -> None:
    source = GUEST.replace("if (has_mask && visible", "if (visible")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"out of bounds: .* an address that belongs to no buffer"):
        attend(cases.build(CALLS["causal_ragged"]), source, schedules=[0])


def test_traits_that_differ_by_address_space_are_refused() -> None:
    """The compiled shader has but one of such traits: the first would stand for all."""
    before, part, after = GUEST.partition("struct pointer_element<threadgroup T*> {")
    source = before + part + after.replace("remove_cv_t<T>", "T", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="`pointer_element` means something else in each"):
        attend(cases.build(CALLS["causal_ragged"]), source, schedules=[0])


def test_unknown_pragma() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape("It knows function_constant(0) = true, matrix_lay")):
        run("y[thread_index] = 0;", source="#pragma METAL_EMULATOR matrix_layout(random)\n" + KERNEL)
