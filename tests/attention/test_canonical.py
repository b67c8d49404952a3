"""The form in which every backend is given a call, whatever the arguments' dtypes: kernels know few."""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from hopper_kernels import canonical, canonical_arguments
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jflash
from jflash._backends import xla
from jflash._semantics.spec import Operands, Spec

APART = 2**32 * np.arange(-2, 3)[:, None] + np.arange(3)
"""Numbers that differ in high bits, in low bits, or in both."""
BELOW_0 = [-(2**63), -(2**31), -2, -1]
IDS = sorted(
    {*APART.ravel().tolist(), *BELOW_0, *(number % 2**bits for number in BELOW_0 for bits in (32, 64)), 2**63 - 1}
)
"""Among them those that negative ones become in unsigned dtypes."""


def draw(seed: int, length: int, dtype: str) -> np.ndarray:
    """Return ids of two batch entries, among those that fit in the dtype."""
    limits = np.iinfo(dtype)
    fit = [number for number in IDS if limits.min <= number <= limits.max]
    return np.random.default_rng(seed).choice(np.asarray(fit, dtype), (2, length))


def with_segments(query: Any, key: Any) -> Operands:
    zeros = {"query": query, "key": key, "value": key}
    zeros = {name: jnp.zeros((*ids.shape, 1, 8)) for name, ids in zeros.items()}
    return canonical_arguments(**zeros, segment_ids=(query, key))[1]


@pytest.mark.parametrize(
    "dtypes",
    [
        ("int64", "int64"),
        ("int32", "int64"),
        ("int64", "uint32"),
        ("uint64", "uint64"),
        ("int32", "int32"),
        ("int8", "uint32"),
        ("uint64", "int32"),
    ],
    ids="-".join,
)
def test_segment_ids_in_32_bits(dtypes: tuple[str, str]):
    """Are equal where they were, and in the same order, by which whole tiles are skipped."""
    query, key = draw(0, 16, dtypes[0]), draw(1, 24, dtypes[1])
    with jax.enable_x64(True):
        arrays = jnp.asarray(query), jnp.asarray(key)
        operands = with_segments(*arrays)
    assert operands.query_segments.dtype == operands.key_segments.dtype == jnp.int32
    for compare in (np.equal, np.less):
        got = compare(operands.query_segments[:, :, None], operands.key_segments[:, None])
        np.testing.assert_array_equal(got, compare(query[:, :, None], key[:, None]))
    # Arrays of 64 bits are what they are where JAX makes no more.
    np.testing.assert_array_equal(with_segments(*arrays).query_segments, operands.query_segments)


def test_segment_ids_of_other_devices():
    """Each device has a chunk of queries and of keys, and meets the others' keys."""
    query, key = draw(0, 16, "int64"), draw(1, 24, "int64")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def segments(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = lambda ids: jnp.zeros((*ids.shape, 1, 8))
        _, operands = canonical_arguments(
            query=zeros(query), key=zeros(key), value=zeros(key), segment_ids=(query, key), sequence_axis="x"
        )
        return operands.query_segments, operands.key_segments

    split = P(None, "x")
    with jax.enable_x64(True):
        # Over some axes alone, where what JAX makes of `jnp.searchsorted` fails (0.12).
        by_hand = jax.shard_map(segments, mesh=mesh, in_specs=split, out_specs=split, axis_names={"x"})
        got = jax.jit(by_hand)(query, key)
    np.testing.assert_array_equal(got[0][:, :, None] == got[1][:, None], query[:, :, None] == key[:, None])


@pytest.mark.parametrize(
    ("query", "bias", "kept"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "float64", "float32"),
        ("float32", "float16", "float16"),
        ("float32", "float8_e4m3fn", "float32"),
        ("float64", "float64", "float64"),
    ],
)
def test_dtype_of_the_bias(query: str, bias: str, kept: str):
    """One that queries may have, and that is no wider than the logits."""
    with jax.enable_x64(True):
        zeros = {name: jnp.zeros((2, 8, 1, 8), query) for name in ("query", "key", "value")}
        spec, operands = canonical_arguments(**zeros, bias=jnp.zeros((8, 8), bias))
    assert spec.bias_dtype == operands.bias.dtype == kept


def test_nothing_has_64_bits():
    case = cases.EVERYTHING._replace(query_length=16, key_length=16, score_mod="indices", segments="far apart")
    with jax.enable_x64(True):
        _, operands = canonical(cases.with_64_bits(cases.build(case)))
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(operands)} <= {1, 4}


SPLIT = dict(query_length=16, key_length=16, heads=(2, 2), causal=True)


@pytest.mark.parametrize("options", [{}, dict(lengths="keys", window=(9, 0), score_mod="indices")], ids=str)
def test_nothing_has_64_bits_where_sequences_are_split(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    """Though parts have offsets, lengths and indices of their own; with nothing but causality, of halves."""
    met: dict[str, set[int]] = {}

    def watch(name: str) -> None:
        real = getattr(xla, name)

        def watched(spec: Spec, *args: Any) -> Any:
            met.setdefault(name, set()).update(leaf.dtype.itemsize for leaf in jax.tree.leaves(args))
            return real(spec, *args)

        monkeypatch.setattr(xla, name, watched)

    watch("forward")
    watch("backward")
    arguments = oracle.arguments(cases.with_64_bits(cases.build(Case(**SPLIT, **options))))
    arrays = jnp.stack([arguments.pop(name) for name in ("query", "key", "value")])
    attend = lambda arrays: jflash.attention(*arrays, **arguments, implementation="xla", sequence_axis="x")
    split, mesh = P(None, None, "x"), jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    by_hand = jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=P(None, "x"), check_vma=False)
    with jax.enable_x64(True):
        jax.eval_shape(jax.grad(lambda arrays: by_hand(arrays).sum()), arrays)
    assert met.keys() == {"forward", "backward"}
    assert set().union(*met.values()) <= {1, 4}
