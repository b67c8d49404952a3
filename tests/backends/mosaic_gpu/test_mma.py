"""The kernels by `mma.sync` on a GPU that runs them, by name: the same questions as everywhere, over what they take."""

import functools

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import score_mod_tables
from cases import Case
from kernel_families import Family, mma
from kernel_values import ON_HARDWARE, drawn
from on_hardware import PLAIN, poison, with_nan_in_padding
from short_run import cover

import jflash
from jflash import _platform
from jflash._backends import mosaic_gpu_mma

pytestmark = pytest.mark.gpu

REFUSAL = mosaic_gpu_mma.unsupported(PLAIN, _platform.current())

# Elsewhere all of them would be skipped with one reason: one of them says it.
PRODUCT = list(cases.product(ON_HARDWARE, 2)) if REFUSAL is None else [{}]
CASES = [
    *(Case(**row) for row in PRODUCT),
    *(pytest.param(drawn(ON_HARDWARE, seed), marks=cover(0)) for seed in range(400 if REFUSAL is None else 0)),
]


@pytest.fixture(autouse=True)
def _on_hardware():
    if REFUSAL is not None:
        pytest.skip(f"mosaic_gpu_mma: {REFUSAL}")


attention = functools.partial(jflash.attention, implementation="mosaic_gpu_mma")
deterministic = functools.partial(attention, deterministic=True)


def this_gpu() -> Family:
    """Return the kernels as they are planned for this machine's GPU."""
    capability = _platform.current().compute_capability
    assert capability is not None
    return mma(capability)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case):
    """Padding holds NaN, which must reach nothing."""
    call = cases.build(case)
    poison()
    planted = with_nan_in_padding(call)
    run = lambda **options: oracle.run(in_precision(**options), planted)
    hopper_kernels.assert_right(run, call, this_gpu())


@functools.cache
def in_precision(**options):
    """One function for each precision, whose compilation the next such call finds."""
    return functools.partial(attention, **options)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [*(("bfloat16", (dim, dim)) for dim in (64, 128, 256)), ("float32", (64, 64)), ("float32", (192, 192))],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, dict(bias="full"), dict(bias="keys", soft_cap=1.5), dict(sinks=True)], ids=str)
def test_deterministic(dims, options, dtype):
    """The same bits on every run, with enough blocks that their order varies."""
    case = Case(dtype, 1024, 1100, heads=(8, 2), dims=dims, batch=(3,), causal=True, **options)
    call = cases.build(case)
    first, *others = [jax.tree.map(np.asarray, oracle.run(deterministic, call)) for _ in range(4)]
    oracle.assert_right(first, call, as_tf32=dtype == "float32")
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize("kind", score_mod_tables.KINDS)
@pytest.mark.parametrize(
    ("operands", "dims", "dtype"),
    [
        ("bfloat16", (64, 64), "float32"),
        ("bfloat16", (128, 128), "bfloat16"),
        ("bfloat16", (256, 256), "float16"),
        ("float32", (64, 64), "float32"),
        ("float32", (128, 128), "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", score_mod_tables.ON_HARDWARE, ids=str)
def test_tables(kind: str, operands: str, dims: tuple[int, int], dtype: str, options: dict):
    """Tables that a score_mod reads by position, and their gradients, in a dtype of their own."""
    case = Case(operands, 523, 640, (4, 2), dims, (3,))._replace(**options)
    call = score_mod_tables.call(case, kind, dtype)
    poison()
    planted = with_nan_in_padding(call)
    run = lambda **options: oracle.run(functools.partial(attention, **options), planted)
    hopper_kernels.assert_right(run, call, this_gpu())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lengths", [None, "keys"])
@pytest.mark.parametrize("query_length", [1, 3, 16])
def test_decoding(query_length: int, lengths: str | None, dtype: str):
    """Heads packed into rows, and keys in several parts."""
    case = Case(dtype, query_length, 5000, heads=(8, 2), dims=(128, 128), lengths=lengths, batch=(3,))
    call = cases.build(case)
    hopper_kernels.assert_right(lambda **options: oracle.run(in_precision(**options), call), call, this_gpu())


def mapped(query, key, value, **options):
    return jax.vmap(functools.partial(attention, **options))(query, key, value)


def rematerialized(query, key, value, **options):
    return jax.checkpoint(functools.partial(attention, **options))(query, key, value)


@pytest.mark.parametrize("transformed", [mapped, rematerialized])
@pytest.mark.parametrize("options", [{}, dict(causal=True, soft_cap=40.0), dict(window=40)], ids=str)
def test_transformations(options: dict, transformed):
    call = cases.build(Case("bfloat16", 300, 400, (4, 2), (128, 128), (2, 3), **options))
    oracle.assert_right(oracle.run(transformed, call), call)


def test_is_the_default_but_on_hopper():
    query = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    first = "mosaic_gpu" if _platform.current().compute_capability == "9.0" else "mosaic_gpu_mma"
    assert jflash.explain(query, query, query).startswith(f"{first} serves")
    assert jflash.explain(*[query.astype(jnp.float32)] * 3).startswith(f"{first} serves")
