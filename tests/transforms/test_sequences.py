"""Sequences split over eight devices: every option, split in every way, gives what one device gives."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import sequences
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from operands import collectives, jit
from refusals import skip_refused
from sequences import CONTEXT, LINE, OPTIONS, WAYS, Way, spec_in_jit
from short_run import cover

import jflash

P = PartitionSpec

IN_SHORT_RUN = [
    ("bias and mask", "ring, odd chunks"),
    ("soft cap, sinks, traced scale", "keys alone"),
    ("dropout", "ring"),
    ("everything", "batch, heads and sequence"),
]
IN_BOTH = [
    *IN_SHORT_RUN,
    ("causal", "ring"),
    ("causal, each its offset", "heads of one key head"),
    ("window", "both axes"),
    ("documents", "an axis each"),
    ("lengths", "queries alone"),
    ("dropout", "all to all"),
]
ROWS = [
    row
    for row in itertools.product(OPTIONS, WAYS)
    if row in IN_BOTH
    or row[0] in ("causal", "everything")
    or row[1] in ("ring", "keys alone", "heads and sequence")
    or hypothesis.settings.get_current_profile_name() == "deep"
]
"""Each option in three ways and two options in each way; with the deep profile the whole product."""


@cover(rest=6)
@pytest.mark.parametrize(
    ("option", "way"), [pytest.param(*row, marks=() if row in IN_SHORT_RUN else cover(0)) for row in ROWS]
)
def test_sharded_jit(option: str, way: str) -> None:
    """Every second row on a mesh with explicit axes."""
    kind = (AxisType.Auto, AxisType.Explicit)[(list(OPTIONS).index(option) + list(WAYS).index(way)) % 2]
    split = WAYS[way]
    attention = functools.partial(jflash.attention, implementation="xla", sequence_strategy=split.strategy)
    with jax.enable_x64(True):
        mesh, call = sequences.mesh_of(split, kind), sequences.call_of(option, split)
        got = sequences.attend(split, mesh, lambda name, _: spec_in_jit(split, name), call, attention)
        sequences.assert_near(got, sequences.on_one_device(option, split.heads, split.lengths))


BY_HAND = [
    *itertools.product(("causal", "bias and mask", "soft cap, sinks, traced scale"), ("ring", "all_to_all", "gather")),
    ("everything", "ring"),
    ("documents", "ring"),
    ("segments far apart", "ring"),
    ("lengths", "gather"),
    ("dropout", "ring"),
    ("dropout", "all_to_all"),
    ("score_mod", "gather"),
]
BY_HAND_IN_SHORT_RUN = [("soft cap, sinks, traced scale", "all_to_all"), ("lengths", "gather")]


@cover(rest=2)
@pytest.mark.parametrize(
    ("option", "strategy"),
    [pytest.param(*row, marks=() if row in BY_HAND_IN_SHORT_RUN else cover(0)) for row in BY_HAND],
)
def test_shard_map(option: str, strategy: str) -> None:
    """The caller splits, and says by which axes. `score_mod` needs `check_vma=False`."""
    way = Way({"x": 2, "y": 4}, P(None, ("x", "y")), P(None, ("x", "y")), heads=(16, 8))
    attention = functools.partial(jflash.attention, implementation="xla", sequence_strategy=strategy)

    def spec_of(name: str, array: Any) -> PartitionSpec:
        """A bias or mask for this device's queries and all keys."""
        if name in ("query", "key", "value", "segment_ids"):
            return way.query
        if name in ("bias", "mask") and array.shape[-2] > 1:
            return P(*[None] * (array.ndim - 2), ("x", "y"))
        return P()

    # JAX does not let a function close over arrays that are on explicit axes.
    explicit = strategy == "ring" and "score_mod" not in OPTIONS[option]
    mesh = sequences.mesh_of(way, AxisType.Explicit if explicit else AxisType.Auto)

    def by_hand(**arguments: Any) -> Any:
        is_array = lambda value: all(isinstance(x, jax.Array) for x in jax.tree.leaves(value)) and value is not None
        arrays = {name: argument for name, argument in arguments.items() if is_array(argument)}
        rest = {name: argument for name, argument in arguments.items() if not is_array(argument)}
        specs = {name: jax.tree.map(functools.partial(spec_of, name), array) for name, array in arrays.items()}
        function = lambda arrays: attention(**arrays, **rest, sequence_axis=("x", "y"))
        return jax.shard_map(
            function, mesh=mesh, in_specs=(specs,), out_specs=way.query, check_vma="score_mod" not in rest
        )(arrays)

    with jax.enable_x64(True):
        got = sequences.attend(way, mesh, spec_of, sequences.call_of(option, way), by_hand)
        sequences.assert_near(got, sequences.on_one_device(option, way.heads, way.lengths))


@cover(every=2, rest=4)
@pytest.mark.parametrize(
    ("way", "option", "dtype"),
    [
        ("ring", "causal", "bfloat16"),
        pytest.param("ring", "full", "float32", marks=cover(0)),
        pytest.param("ring", "everything", "bfloat16", marks=cover(0)),
        pytest.param("keys alone", "causal", "float16", marks=cover(0)),
        pytest.param("an axis each", "soft cap, sinks, traced scale", "bfloat16", marks=cover(0)),
    ],
)
def test_numbers_are_right(split_backend: str, way: str, option: str, dtype: str) -> None:
    """Errors are at most twice that of plain attention, though results of parts are merged."""
    split = WAYS[way]._replace(lengths=(256, 256))
    call = sequences.call_of(option, split, dtype)
    mesh = sequences.mesh_of(split)
    smooth, discrete, static = oracle.split(call)
    attention = functools.partial(jflash.attention, implementation=split_backend, sequence_strategy=split.strategy)
    skip_refused(split_backend, **oracle.arguments(call))
    place = lambda name, array: jax.device_put(array, NamedSharding(mesh, spec_in_jit(split, name)))
    on_devices = [
        {name: jax.tree.map(functools.partial(place, name), value) for name, value in arrays.items()}
        for arrays in (smooth, discrete)
    ]
    function = oracle.function_of_arrays(attention, static)

    @jit
    def both(smooth: Any, discrete: Any, cotangents: Any) -> Any:
        (out, lse), pull_back = jax.vjp(lambda smooth: function(smooth, discrete), smooth)
        return oracle.Results(out, lse, *pull_back(cotangents))

    oracle.assert_right(both(*on_devices, (call.d_out, call.d_lse)), call)


def shapes(way: Way, length: int, dim: int = 16, kind: AxisType = AxisType.Auto) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of query, key and value."""
    mesh, (heads, key_heads) = sequences.mesh_of(way, kind), way.heads
    of = lambda heads, spec: jax.ShapeDtypeStruct(
        (1, length, heads, dim), jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    return [of(heads, way.query), of(key_heads, way.key), of(key_heads, way.key)]


def gradients(attention: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jnp.sin(attention(*arrays)).sum(), (0, 1, 2))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=cover(0)),
        dict(is_causal=True),
        pytest.param(dict(local_window_size=(100, 20)), marks=cover(0)),
    ],
    ids=str,
)
def test_a_ring_gathers_nothing(options: dict[str, Any]) -> None:
    """Forward, tangent and gradients send arrays from device to device."""
    attention = functools.partial(jflash.attention, implementation="xla", sequence_strategy="ring", **options)
    arrays = shapes(WAYS["ring"], 512)
    every = lambda *arrays: [part(attention)(*arrays) for part in PARTS.values()]
    assert set(collectives(jit(every).lower(*arrays).compile())) == {"collective-permute"}


def test_explain_says_what_is_done_and_why() -> None:
    def said(way: Way, length: int = 131072, **options: Any) -> str:
        return jflash.explain(*shapes(way, length, 128), is_causal=True, **options).splitlines()[-1]

    assert said(Way(LINE, CONTEXT, CONTEXT, (32, 4))).startswith("sequences: ring, zigzag; by count, gather 1.")
    assert said(Way(LINE, CONTEXT, CONTEXT, (32, 8))).startswith("sequences: all_to_all; by count, ring 1.")
    assert said(Way(LINE, CONTEXT, CONTEXT), sequence_strategy="gather") == "sequences: gather, as named"
    assert said(Way(LINE, P(), CONTEXT)).startswith("sequences: keys split")
    assert "sequences" not in said(Way(LINE, P(), P()))
    heads = Way({"x": 4, "h": 2}, P(None, "x", "h"), P(None, "x", "h"), (6, 6))
    assert said(heads).startswith("sequences: ring, zigzag")
    # A sharding is of the axes as they came, of several for the batch too.
    several = [
        jax.ShapeDtypeStruct((2, 2, 64, 6, 16), jnp.float32, sharding=NamedSharding(array.sharding.mesh, spec))
        for array, spec in zip(shapes(heads, 64), [P(None, "h", "x")] * 3, strict=True)
    ]
    assert "sequences: ring" in jflash.explain(*several)


def test_explain_inside_shard_map() -> None:
    found: list[str] = []

    def local(*arrays: jax.Array) -> jax.Array:
        found.append(jflash.explain(*arrays, sequence_axis="x").splitlines()[-1])
        return arrays[0]

    mesh = sequences.mesh_of(WAYS["ring"])
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=CONTEXT, out_specs=CONTEXT), *shapes(WAYS["ring"], 64))
    assert found[0].startswith("sequences: ring")


def test_decoding_with_a_cache_split_over_devices() -> None:
    """A step moves one number for each query and head, and the output; nothing of the cache, which may end in NaN."""
    rows = np.random.default_rng(0).standard_normal
    query, key, value = (rows(shape).astype(np.float32) for shape in ((2, 1, 8, 16), (2, 512, 2, 16), (2, 512, 2, 16)))
    lengths = np.array([1, 300])
    key[:, 300:] = value[:, 300:] = np.nan

    def step(query: Any, key: Any, value: Any) -> Any:
        options = dict(is_causal=True, query_offset=lengths - 1, key_value_seq_lengths=lengths, return_residual=True)
        return jflash.attention(query, key, value, **options)

    mesh = sequences.mesh_of(WAYS["keys alone"])
    arrays = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((query, key, value), (P(), CONTEXT, CONTEXT), strict=True)
    ]
    compiled = jit(step).lower(*arrays).compile()
    assert sorted(collectives(compiled)) == ["all-gather", "all-reduce"]
    want = jit(step)(query, np.nan_to_num(key), np.nan_to_num(value))
    sequences.assert_near(compiled(*arrays), jax.tree.map(np.asarray, want), 1e-6)


PARTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "forward": lambda attention: attention,
    "tangent": lambda attention: lambda *arrays: jax.jvp(attention, arrays, arrays),
    "gradients": gradients,
}


@cover(0)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("part", PARTS)
def test_memory_falls_with_the_number_of_devices(part: str, is_causal: bool) -> None:
    """Memory stays as it is with 1,024 tokens on each device, however many there are."""
    options = dict(is_causal=is_causal, implementation="xla", sequence_strategy="ring")
    function = jit(PARTS[part](functools.partial(jflash.attention, **options)))

    def temporary(devices: int) -> int:
        mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
        form = (1, 1024 * devices, 8, 64)
        array = jax.ShapeDtypeStruct(form, jnp.float32, sharding=NamedSharding(mesh, CONTEXT))
        return function.lower(array, array, array).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) <= 1.05 * temporary(4)


def layers(attention: Callable[..., Any], wrap: Callable[..., Any] = lambda layer: layer) -> Callable[..., Any]:
    def function(query: Any, key: Any, value: Any) -> Any:
        layer = lambda query, _: (query + attention(query, key, value), None)
        return jax.lax.scan(wrap(layer), query, None, length=2)[0]

    return function


def second_order(attention: Callable[..., Any]) -> Callable[..., Any]:
    total = lambda *arrays: sum(jnp.cos(gradient).sum() for gradient in gradients(attention)(*arrays))
    return jax.grad(total, (0, 1, 2))


def hessian_vector_product(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: jax.jvp(gradients(attention), arrays, arrays)


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "gradient of a scan": lambda attention: gradients(layers(attention)),
    "gradient of a scan of checkpoints": lambda attention: gradients(layers(attention, jax.checkpoint)),
    "gradient of vmap": lambda attention: gradients(jax.vmap(attention)),
    "vmap of gradients": lambda attention: jax.vmap(gradients(attention)),
    "gradient of a gradient": second_order,
    "Hessian-vector product": hessian_vector_product,
    "gradient of a tangent": lambda attention: gradients(lambda *arrays: jax.jvp(attention, arrays, arrays)[1]),
}


@cover(0, rest=2)
@pytest.mark.parametrize(("transform", "by_hand"), list(itertools.product(TRANSFORMS, (False, True))))
def test_transforms(transform: str, by_hand: bool) -> None:
    """Transforms work in sharded `jit`, and in `shard_map`."""
    mesh = sequences.mesh_of(Way({"x": 4, "y": 2}, P(), P()))
    attention = functools.partial(jflash.attention, is_causal=True, implementation="xla", sequence_strategy="ring")
    split = attention
    if by_hand:
        # What vmap maps is not there for what it calls.
        where = P("x") if "vmap" in transform else CONTEXT
        split = lambda *arrays: jax.shard_map(
            functools.partial(attention, sequence_axis="x"), mesh=mesh, in_specs=where, out_specs=where
        )(*arrays)
    with jax.enable_x64(True):
        rows = np.random.default_rng(0).standard_normal
        arrays = [rows((2, 16, heads, 8)) for heads in (4, 2, 2)]
        want = jit(TRANSFORMS[transform](attention))(*arrays)
        on_devices = [jax.device_put(array, NamedSharding(mesh, CONTEXT)) for array in arrays]
        got = jit(TRANSFORMS[transform](split))(*on_devices)
        sequences.assert_near(got, jax.tree.map(np.asarray, want), 1e-11)
