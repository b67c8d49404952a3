"""float32 operands as bfloat16 pieces: exact enough, in as few products, and refused where they have no room."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_kernels import canonical_arguments
from interpreter import Interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import DotAlgorithmPreset

from jflash._backends import mosaic_gpu, mosaic_gpu_mma
from jflash._backends.mosaic_gpu import piece_products, plan, smem
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Spec

OPS = Interpreter(plgpu.InterpretGPUParams())
BITS = {"BF16_BF16_F32": 8, None: 16, "highest": 24}


def spec_of(head_dim: int = 32, value_dim: int | None = None, length: int = 256, **options: Any) -> Spec:
    query, value = (jnp.zeros((1, length, 2, dim), jnp.float32) for dim in (head_dim, value_dim or head_dim))
    return canonical_arguments(query=query, key=query, value=value, **options)[0]


def numbers(seed: int, *shape: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 2.0 ** generator.integers(-20, 20, shape)).astype(np.float32)


@pytest.mark.parametrize("precision", BITS)
def test_an_array_is_the_sum_of_its_pieces(precision: str | None):
    """To half a unit in the last place of their bits; the largest numbers, infinities and NaN as they are."""
    spec, values = spec_of(precision=precision), numbers(0, 100, 32)
    split = np.asarray(operand_pieces.split_array(spec, values), np.float64)
    total = split.reshape(100, -1, 32).sum(axis=1)
    np.testing.assert_array_less(np.abs(total - values), np.abs(values) * 2.0 ** -BITS[precision] + 1e-300)
    largest = np.finfo(np.float32).max
    special = np.array([largest, -largest, np.inf, -np.inf, np.nan], np.float32)
    pieces = np.asarray(operand_pieces.split_array(spec, special), np.float64).reshape(-1, 5)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(pieces.sum(axis=0), special, rtol=2.0**-7)


@pytest.mark.parametrize("precision", BITS)
def test_products_of_pieces(precision: str | None):
    """An operand in registers, times one in shared memory: as exact as their bits, by 1, 3 or 6 products."""
    spec, rows, columns = spec_of(precision=precision), numbers(1, 64, 32), numbers(2, 16, 32)
    issued = []
    a, b = operand_pieces.split(spec, jnp.asarray(rows), OPS), operand_pieces.split_array(spec, columns)
    parts = tuple(b[:, start : start + 32].T for start in range(0, b.shape[1], 32))

    class Ops:
        @staticmethod
        def mma(accumulator: Any, left: jax.Array, right: jax.Array) -> None:
            issued.append(np.asarray(left, np.float64) @ np.asarray(right, np.float64))

    piece_products.mma(None, a, parts, Ops)
    assert len(issued) == operand_pieces.products(spec)
    # Of |x| |y|, what the last bits of each and the products that are left out may add up to.
    allowed = np.abs(rows).astype(np.float64) @ np.abs(columns).astype(np.float64).T * 4 * 2.0 ** -BITS[precision]
    truth = rows.astype(np.float64) @ columns.astype(np.float64).T
    np.testing.assert_array_less(np.abs(sum(issued) - truth), allowed)


@pytest.mark.parametrize(
    ("precision", "products"),
    [
        *dict.fromkeys(
            [None, "default", "high", jax.lax.Precision.HIGH, "tensorfloat32", ("high", "default")], 3
        ).items(),
        *dict.fromkeys(["highest", "float32", jax.lax.Precision.HIGHEST, ("default", "highest")], 6).items(),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, 1),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, 3),
        ("BF16_BF16_F32_X6", 6),
        ("TF32_TF32_F32", 3),
    ],
    ids=str,
)
def test_precision_decides(precision: Any, products: int):
    spec = spec_of(precision=precision)
    assert mosaic_gpu.unsupported_call(spec) is None
    assert operand_pieces.products(spec) == products


def test_the_default_precision_is_that_of_jax():
    with jax.default_matmul_precision("highest"):
        assert operand_pieces.products(spec_of()) == 6
        assert operand_pieces.products(spec_of(precision="high")) == 3


BOTH = pytest.mark.parametrize("backend", [mosaic_gpu, mosaic_gpu_mma], ids=lambda backend: backend.__name__)


@BOTH
@pytest.mark.parametrize("precision", ["F32_F32_F32", "BF16_BF16_F32_X9", DotAlgorithmPreset.F16_F16_F32], ids=str)
def test_other_precisions_are_refused_by_name(precision: Any, backend: Any):
    reason = backend.unsupported_call(spec_of(precision=precision))
    assert reason == f"it has no float32 products of precision {getattr(precision, 'name', precision)}."


@BOTH
def test_a_soft_cap_is_not_exact_enough_for_float32(backend: Any):
    assert backend.unsupported_call(spec_of(logits_soft_cap=5.0)) is None
    assert "its soft cap" in str(backend.unsupported_call(spec_of(logits_soft_cap=5.0, precision="highest")))


@BOTH
@pytest.mark.parametrize("name", ["tanh", "sin", "cos"])
def test_nor_is_a_score_mod_with_such_functions(name: str, backend: Any):
    score_mod = jax.jit(lambda logit, b, h, q, k: 2.0 * getattr(jnp, name)(logit))
    assert backend.unsupported_call(spec_of(score_mod=score_mod)) is None
    assert name in str(backend.unsupported_call(spec_of(score_mod=score_mod, precision="highest")))


OPTIONS: list[dict[str, Any]] = [
    {},
    dict(is_causal=True, alibi_slopes=jnp.zeros(2)),
    dict(bias=jnp.zeros((1, 2, 256, 256), jnp.float32)),
    dict(bias=jnp.zeros((1, 2, 1, 256), jnp.float32)),
    dict(deterministic=True, bias=jnp.zeros((1, 2, 1, 256), jnp.float32), score_mod=lambda logit, *_: 2 * logit),
    dict(mask=jnp.zeros((1, 2, 256, 256), bool), deterministic=True),
    dict(dropout_rate=0.1, dropout_key=jax.random.key(0)),
]


@pytest.mark.parametrize(("precision", "largest"), [(None, 256), ("highest", 160), ("BF16_BF16_F32", 256)])
def test_every_kernel_of_a_call_that_is_served_has_tiles_that_fit(precision: str | None, largest: int):
    """Heads up to a size are served with every option; of larger ones, what is not refused."""
    for options, dim, processors in itertools.product(OPTIONS, (1, 64, 80, largest, 192, 256, 320), (None, 1, 132)):
        spec = spec_of(dim, precision=precision, **options)
        reason = mosaic_gpu.unsupported_call(spec)
        if reason is not None:
            assert dim > largest, (dim, options)
            assert "do not fit in shared memory" in reason
            continue
        kernels = plan.plan_forward(spec, processors), *plan.plan_backward(spec, processors)
        assert all(smem.fits(kernel.plan.launch.smem) for kernel in kernels)
