"""Calls whose sequences are split over eight devices: every option, every way to split, and what one device makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Case, build
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from operands import jit
from plain_attention import Call

import jflash

P = PartitionSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "causal, each its offset": dict(causal=True, offset="each"),
    "causal, behind": dict(causal=True, offset="negative"),
    "window behind": dict(causal=True, window=(10, 0)),
    "window": dict(window=(17, 7)),
    "documents": dict(causal=True, segments="sorted"),
    "unsorted segments": dict(segments="unsorted"),
    "lengths": dict(causal=True, lengths="both"),
    "bias and mask": dict(causal=True, bias="full", mask="full"),
    "bias of keys": dict(causal=True, bias="keys", mask="queries"),
    "bias of queries": dict(bias="queries", mask="keys"),
    "ALiBi": dict(causal=True, alibi=True),
    "soft cap, sinks, traced scale": dict(causal=True, soft_cap=1.5, sinks=True, scale="traced"),
    "sinks and no key": dict(causal=True, window=(0, 0), sinks=True, offset="negative"),
    "dropout": dict(causal=True, dropout=True),
    "score_mod": dict(causal=True, score_mod="arrays"),
    "everything": dict(
        causal=True, window=(40, 0), lengths="both", segments="sorted", soft_cap=1.5, sinks=True, scale="traced",
        alibi=True, bias="full", mask="full", score_mod="arrays", dropout=True, offset="each",
    ),
    "segments far apart": dict(causal=True, segments="far apart"),
}  # fmt: skip
"""The options of calls, in the words of `Case`."""


class Way(NamedTuple):
    """A way to split a call: the mesh, where queries and keys are, and how many heads and tokens there are."""

    mesh: dict[str, int]
    query: PartitionSpec
    key: PartitionSpec
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, int] = (64, 64)
    strategy: str | None = None


LINE, CONTEXT = {"x": 8}, P(None, "x")
WAYS: dict[str, Way] = {
    "ring": Way(LINE, CONTEXT, CONTEXT, strategy="ring"),
    "ring, one head": Way(LINE, CONTEXT, CONTEXT, heads=(3, 1), strategy="ring"),
    "ring, odd chunks": Way(LINE, CONTEXT, CONTEXT, lengths=(40, 72), strategy="ring"),
    "all to all": Way(LINE, CONTEXT, CONTEXT, heads=(16, 8), strategy="all_to_all"),
    "gather": Way(LINE, CONTEXT, CONTEXT, strategy="gather"),
    "queries alone": Way(LINE, CONTEXT, P()),
    "keys alone": Way(LINE, P(), CONTEXT),
    "both axes": Way({"x": 4, "y": 2}, P(None, ("x", "y")), P(None, ("x", "y"))),
    "an axis each": Way({"x": 4, "y": 2}, P(None, "x"), P(None, "y")),
    "partly the same": Way({"x": 4, "y": 2}, P(None, ("x", "y")), P(None, "x")),
    "batch and sequence": Way({"d": 2, "x": 4}, P("d", "x"), P("d", "x")),
    "heads and sequence": Way({"x": 4, "h": 2}, P(None, "x", "h"), P(None, "x", "h")),
    "heads of one key head": Way({"x": 4, "h": 2}, P(None, "x", "h"), P(None, "x"), heads=(4, 1)),
    "batch, heads and sequence": Way({"d": 2, "x": 2, "h": 2}, P("d", "x", "h"), P("d", "x", "h")),
    "indivisible": Way(LINE, P(), P(), lengths=(52, 52)),
}

OF_QUERIES = {"bias": -2, "mask": -2}
"""The axis on which a pairwise operand has its queries. `shard_map` wants this device's."""


def call_of(option: str, way: Way, dtype: str = "float64") -> Call:
    """The call, small."""
    words = {"dims": (16, 8), "batch": (2,), **OPTIONS[option]}
    query_length, key_length = way.lengths
    return build(Case(dtype=dtype, heads=way.heads, query_length=query_length, key_length=key_length, **words))


def mesh_of(way: Way, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(tuple(way.mesh.values()), tuple(way.mesh), axis_types=(kind,) * len(way.mesh))


def spec_in_jit(way: Way, name: str) -> PartitionSpec:
    """Return the split of an argument: only queries, keys and values are split."""
    return {"query": way.query, "key": way.key, "value": way.key}.get(name, P())


def attend(
    way: Way, mesh: Mesh | None, spec_of: Callable[[str, Any], PartitionSpec], call: Call, attention: Callable[..., Any]
) -> Any:
    """Results, their tangents, and all gradients; the arrays come as `spec_of` says, or to one device."""
    smooth, discrete, static = oracle.split(call)
    function = oracle.function_of_arrays(attention, static)

    def place(name: str, value: Any) -> Any:
        if mesh is None:
            return value
        return jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, spec_of(name, array))), value)

    smooth, discrete = ({name: place(name, value) for name, value in arrays.items()} for arrays in (smooth, discrete))
    return jit(functools.partial(derivatives, function))(smooth, discrete, (call.d_out, call.d_lse))


def derivatives(function: Callable[..., Any], smooth: Any, discrete: Any, cotangents: Any) -> Any:
    """Results, their tangents where all operands move, and the gradients. Rows that see no key have lse 0 here."""

    def finite(smooth: Any) -> Any:
        out, lse = function(smooth, discrete)
        return out, jnp.where(lse == -jnp.inf, 0, lse)

    along = jax.tree.map(lambda array: jnp.sin(3 * array), smooth)
    results, pull_back = jax.vjp(finite, smooth)
    return results, jax.jvp(finite, (smooth,), (along,))[1], pull_back(cotangents)[0]


@functools.lru_cache(maxsize=4)
def on_one_device(option: str, heads: tuple[int, int], lengths: tuple[int, int]) -> Any:
    """The truth, in float64: the definition, which tests of its own hold to NumPy's."""
    way = Way({}, P(), P(), heads, lengths)
    attention = functools.partial(jflash.attention, implementation="reference")
    made = attend(way, None, lambda *_: P(), call_of(option, way), attention)
    return jax.tree.map(np.asarray, made)


def assert_near(got: Any, want: Any, rounded: float = 1e-12) -> None:
    """Up to roundings of float64, relative to the largest number."""

    def compare(path: Any, got: Any, want: np.ndarray) -> None:
        size = np.max(np.abs(want), initial=1e-3)
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=rounded * size, err_msg=str(path))

    jax.tree.map_with_path(compare, got, want)
