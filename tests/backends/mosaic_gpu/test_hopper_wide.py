"""The Hopper kernels of heads wider than 256: their plans, and the kernels in Pallas' interpreter."""

import dataclasses
import functools
import itertools
from typing import Any

import cases
import hopper_kernels
import jax.numpy as jnp
import numpy as np
import oracle
import parts
import pytest
from cases import Case
from kernel_values import INTERPRETED
from short_run import sampled

from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu import plan
from jflash._backends.mosaic_gpu.hardware import smem
from jflash._backends.mosaic_gpu.kernels.forward_wide import WideForwardPlan
from jflash._semantics.spec import Spec

DIMS = ((512, 512), (576, 512), (320, 320), (257, 64), (64, 512))
VALUES = {
    **INTERPRETED,
    "dtype": ("bfloat16", "float16"),
    "key_length": (17, 131, 200),
    "dims": DIMS,
}
CASES = [Case(batch=(2,), **row) for row in cases.product(VALUES, 2)]

# Two blocks of queries, and the general form of logits.
IN_SHORT_RUN = next(case for case in CASES if case.dims == (64, 512) and case.query_length > 64 and case.mask == "full")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == IN_SHORT_RUN else pytest.mark.slow) for case in CASES], ids=str
)
def test_wide(case: Case):
    call = cases.build(case)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@sampled(3)
@pytest.mark.parametrize(
    ("dims", "heads", "query_length", "processors"),
    [
        ((576, 512), (16, 1), 1, 8),
        # More heads than rows of a block: two blocks.
        ((576, 512), (128, 1), 1, 8),
        ((512, 512), (24, 2), 3, 1),
    ],
    ids=str,
)
def test_decoding(dims: tuple[int, int], heads: tuple[int, int], query_length: int, processors: int):
    """Heads packed into rows, keys in several splits, lengths for each sequence."""
    case = Case("bfloat16", query_length, 600, heads, dims, (1,), causal=True, offset="end", lengths="keys")
    call = dataclasses.replace(cases.build(case), d_out=None, d_lse=None)
    spec, _ = hopper_kernels.canonical(call)
    found = plan.plan_forward(spec, processors)
    assert found.packed_heads > 1
    assert (found.splits > 1) == (processors > 1)
    oracle.assert_right(hopper_kernels.run(call, processors), call)


@pytest.mark.slow
def test_tiles_of_few_keys():
    """Where tiles of a float32 bias leave room for no more."""
    case = Case("float16", 131, 131, heads=(2, 1), dims=(576, 512), bias="full", mask="full", window=(40, 10))
    call = cases.build(case)
    call = dataclasses.replace(call, bias=call.bias.astype(np.float32))
    spec, _ = hopper_kernels.canonical(call)
    assert plan.plan_forward(spec, 132).tile.keys == 32
    oracle.assert_right(hopper_kernels.run(call), call)


@pytest.mark.slow
@pytest.mark.parametrize("moving", [None, ("value",)], ids=str)
@pytest.mark.parametrize("dims", [(320, 320), (257, 64), (64, 512)], ids=str)
def test_tangents(dims: tuple[int, int], moving: tuple[str, ...] | None):
    """Of all operands, where they fit beside them; of values alone, which are a forward."""
    call = cases.build(Case("bfloat16", 70, 131, heads=(2, 1), dims=dims, batch=(1,), causal=True, offset="end"))
    every = oracle.draw_tangents(call)
    hopper_kernels.assert_tangents_right(call, {name: every[name] for name in moving or every})


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(causal=True), dict(bias="full", lengths="both", dropout=True)], ids=str)
def test_a_part(options: dict):
    """Of a call whose sequences are split over devices, as tests/backends/test_partial.py has it."""
    call = cases.build(Case("bfloat16", 131, 64, heads=(2, 2), dims=(320, 512), batch=(2,), **options))
    oracle.assert_right(parts.run(call, *hopper_kernels.functions()), call)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(512, 512), (576, 576), (8, 512)], ids=str)
def test_head_groups(dims: tuple[int, int]):
    """Query heads that share keys, in groups whose dK and dV are summed in the end."""
    call = cases.build(Case("bfloat16", 70, 70, heads=(4, 1), dims=dims, batch=(1,), causal=True, bias="keys"))
    spec, _ = hopper_kernels.canonical(call)
    assert all(kernel.stores_sums for kernel in plan.plan_backward(spec, 132).wide[1:])
    oracle.assert_right(hopper_kernels.run(call), call)


def spec_of(head_dim: int, value_dim: int, **options: object) -> Spec:
    shapes = dict(query=(2, 300, 4, head_dim), key=(2, 200, 2, head_dim), value=(2, 200, 2, value_dim))
    dtype = options.pop("dtype", jnp.bfloat16)
    arrays = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    return hopper_kernels.canonical_arguments(**arrays, **options)[0]


@pytest.mark.parametrize("bias", [None, jnp.bfloat16, jnp.float32])
def test_every_size_fits(bias: Any):
    """Tiles of every kernel are found for all H and D up to 576, one of them above 256; with tiles of a bias to 544."""
    options = {} if bias is None else dict(bias=jnp.zeros((1, 1, 300, 200), bias))
    plain = spec_of(512, 512, **options)
    sizes = range(16, 577, 16) if bias is None else range(32, 545, 32)
    for head_dim, value_dim in itertools.product(sizes, sizes):
        if max(head_dim, value_dim) <= 256:
            continue
        spec = dataclasses.replace(plain, head_dim=head_dim, value_dim=value_dim)
        assert mosaic_gpu.unsupported_call(spec) is None
        forward, backward = plan.plan_forward(spec, 132), plan.plan_backward(spec, 132)
        assert isinstance(forward, WideForwardPlan)
        kernels = [forward, *backward.wide, *([] if backward.dbias is None else [backward.dbias])]
        assert len(kernels) == 4 + (bias is not None)
        for kernel in kernels:
            assert smem.fits(kernel.launch.smem), (head_dim, value_dim, kernel)


def test_what_is_refused():
    assert "at most 576" in str(mosaic_gpu.unsupported_call(spec_of(577, 64)))
    assert "float32" in str(mosaic_gpu.unsupported_call(spec_of(64, 257, dtype=jnp.float32)))
    bias = jnp.zeros((1, 1, 300, 200), jnp.float32)
    assert "shared memory" in str(mosaic_gpu.unsupported_call(spec_of(576, 576, bias=bias)))


def test_the_plan_in_words():
    text = plan.describe(spec_of(576, 512), 132)
    assert "jflash_forward_576_512" in text
    assert text.count("jflash_wide_d_") == 3
    assert "tangent" not in text
    assert "jflash_tangent_320" in plan.describe(spec_of(320, 320), 132)
