"""What the Hopper kernels are made of, each part by itself: the soft cap, pieces of bfloat16, delta."""

import math
from typing import Any

import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import CommonInterpreter, Interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from mma_interpreter import MmaInterpreter
from short_run import cover

from jflash._backends.mosaic_gpu import bf16_columns
from jflash._backends.mosaic_gpu.ops import WarpgroupOps
from jflash._backends.mosaic_gpu.row_statistics import row_sums
from jflash._backends.mosaic_gpu_mma.cta import MmaOps
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.tile import operand_pieces, soft_cap
from jflash._semantics.spec import Residuals


@pytest.mark.parametrize("cap", [1.5, 50.0])
@pytest.mark.parametrize("scale", [0.125, 1e-6, 40.0])
def test_soft_cap_by_size(cap: float, scale: float):
    """As near to tanh where some products are small as where all are: a small logit's error is small."""
    all_below = lambda x, limit: jnp.all(jnp.abs(x) < limit)
    for most in (0.01, 0.499, 0.501, 3.0, 1e6):
        products = (np.linspace(-most, most, 20_001) * (cap / scale)).astype(np.float32)
        capped = soft_cap.soft_cap(jnp.asarray(products), scale, cap, all_below)
        expected = cap * np.tanh(products.astype(np.float64) * scale / cap)
        np.testing.assert_allclose(capped, expected, rtol=1e-6)


@cover(2)
@pytest.mark.parametrize("cap", [1e-6, 1.5, 50.0, 2.0**14])
@pytest.mark.parametrize("most", [math.inf, 30.0, 13.0])
@pytest.mark.parametrize("ratio", [1e-30, 2**-11.9, 0.7, -0.01, 2**11.9, 1e20])
@pytest.mark.parametrize("is_known", [False, True])
def test_forms_of_soft_cap(cap: float, most: float, ratio: float, is_known: bool):
    """A scale makes products large or small beside the cap, and is known beforehand or not."""
    scale = float(np.float32(ratio * cap))
    products = (np.linspace(-20, 20, 200_001) * (cap / scale)).clip(-3e38, 3e38).astype(np.float32)
    given = scale if is_known else jnp.float32(scale)
    form, numbers = soft_cap.SoftCap.of(jnp.asarray(products), given, cap, factor=1.5, most=most)
    expected = 1.5 * cap * np.tanh(products.astype(np.float64) * scale / cap)
    np.testing.assert_allclose(form.of_any(numbers), expected, rtol=1e-6)
    are_small = np.abs(numbers) < form.limit
    assert are_small.any()
    np.testing.assert_allclose(form.of_small(numbers)[are_small], expected[are_small], rtol=1e-6)
    assert np.abs(expected[are_small]).max() <= most


@pytest.mark.parametrize(
    ("interpreter", "hardware"), [(CommonInterpreter, Ops), (Interpreter, WarpgroupOps), (MmaInterpreter, MmaOps)]
)
def test_the_interpreter_has_all_operations(interpreter: type[Ops], hardware: type[Ops]):
    operations = [name for name, value in vars(hardware).items() if callable(value) and name[0] != "_"]
    assert operations
    for name in operations:
        assert getattr(interpreter, name) is not getattr(hardware, name), name


def test_three_numbers_of_bfloat16_make_one_of_float32():
    generator = np.random.default_rng(0)
    values = (generator.normal(size=10_000) * 2.0 ** generator.integers(-90, 90, 10_000)).astype(np.float32)
    pieces = [np.asarray(piece) for piece in operand_pieces.split_numbers(jnp.asarray(values))]
    for piece in pieces:
        np.testing.assert_array_equal(piece, np.asarray(jnp.asarray(piece, jnp.bfloat16), np.float32))
    np.testing.assert_array_equal(sum(piece.astype(np.float64) for piece in pieces), values)


def test_pieces_of_a_bias_of_keys():
    """Their sum is the bias, in any order; one that is not finite is its first piece."""
    generator = np.random.default_rng(0)
    finite = generator.normal(size=10_000) * 2.0 ** generator.integers(-90, 119, 10_000)
    values = np.concatenate([finite, [2.0**126, -(2.0**126), 0, np.inf, -np.inf, np.nan]]).astype(np.float32)
    pieces = np.asarray(bf16_columns._pieces(jnp.asarray(values)[None, None]), np.float32)[0, 0]
    assert pieces.shape[1] == bf16_columns.STORED_COLUMNS
    np.testing.assert_array_equal(np.add.reduce(pieces, 1), values)
    np.testing.assert_array_equal(np.add.reduce(pieces[:, ::-1], 1), values)
    np.testing.assert_array_equal(pieces[:, 3:], 0)
    np.testing.assert_array_equal(pieces[-3:, 1:], 0)


@cover(every=6)
@pytest.mark.parametrize(
    ("dtype", "queries", "value_dim"),
    [
        *((jnp.bfloat16, *size) for size in [(1, 8), (8, 8), (70, 80), (72, 80), (72, 24), (128, 256)]),
        # No swizzle of float32 has columns that divide these.
        (jnp.float32, 72, 70),
    ],
)
def test_delta(dtype: Any, queries: int, value_dim: int):
    """delta, columns that are lse and delta, and zeros; for queries that see nothing, and behind the last one."""
    rows = -(-queries // 8) * 8
    generator = np.random.default_rng(0)
    shape = (2, queries, 3, value_dim)
    out, d_out = (jnp.asarray(generator.normal(size=shape), dtype) for _ in range(2))
    lse, d_lse = (generator.normal(size=(2, 3, queries)).astype(np.float32) for _ in range(2))
    lse[0, 1, -1] = -np.inf
    spec, _ = hopper_kernels.canonical_arguments(query=out, key=out, value=out, scale=0.3)
    ops = Interpreter(plgpu.InterpretGPUParams(detect_races=True))
    dq_acc = jax.ShapeDtypeStruct((4, -(-rows // 64) * 64, 16), jnp.float32)
    residuals = Residuals(out, jnp.asarray(lse), d_out, jnp.asarray(d_lse))
    results = row_sums(spec, residuals, ops, column_rows=queries + 128, dq_acc=dq_acc)
    made, columns, zeros = (results[name] for name in ("delta", "columns", "dq_acc"))
    assert not hopper_kernels.races_found()

    products = np.asarray(out, np.float64) * np.asarray(d_out, np.float64)
    exact = products.sum(axis=-1).transpose(0, 2, 1) - d_lse
    error = np.abs(np.asarray(made) - np.where(lse == -np.inf, 0, exact))
    size = np.abs(products).sum(axis=-1).transpose(0, 2, 1) + np.abs(d_lse)
    assert (error <= size * value_dim * 2.0**-24).all()
    assert made[0, 1, -1] == 0

    columns = np.asarray(columns, np.float64)
    assert columns.shape[2] == -(-(queries + 128) // 64) * 64
    np.testing.assert_array_equal(columns[..., 6:], 0)
    # exp2 of such a number times any scale that is allowed is 0.
    behind = columns[:, :, queries:, :3].sum(axis=-1)
    assert (behind < -3e38).all()
    assert columns[0, 1, queries - 1, :3].sum() < -3e38
    seen = lse > -np.inf
    np.testing.assert_allclose(columns[:, :, :queries, :3].sum(axis=-1)[seen], (-lse / 0.3)[seen], rtol=2.0**-22)
    np.testing.assert_array_equal(columns[:, :, :queries, 3:6].sum(axis=-1), -np.asarray(made))
    np.testing.assert_array_equal(columns[:, :, queries:, 3:6], 0)
    np.testing.assert_array_equal(zeros, 0)


def test_no_columns_where_two_kernels_make_the_gradients():
    out = jnp.ones((1, 8, 1, 16), jnp.bfloat16)
    numbers = jnp.zeros((1, 1, 8))
    spec, _ = hopper_kernels.canonical_arguments(query=out, key=out, value=out)
    ops = Interpreter(plgpu.InterpretGPUParams())
    results = row_sums(spec, Residuals(out, numbers, out, numbers), ops)
    np.testing.assert_array_equal(results["delta"], 16)
    assert results.keys() == {"delta"}
