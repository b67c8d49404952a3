"""Mask functions under JAX's transforms, and over devices: what the definition with a dense mask gives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mask_functions
import numpy as np
import pytest
import sequences
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from operands import jit
from short_run import cover

import jflash

P = PartitionSpec
LENGTH, HEADS, KEY_HEADS = 1024, 4, 2
ROUNDED = 1e-12
Arrays = tuple[jax.Array, jax.Array, jax.Array]


@pytest.fixture(autouse=True)
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


def arrays(length: int = LENGTH, batch: int = 2) -> Arrays:
    normal = np.random.default_rng(0).standard_normal
    query, key, value = (jnp.asarray(normal((batch, length, heads, 16))) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return query, key, value


def attend(*arrays: jax.Array, **options: Any) -> jax.Array:
    return jflash.attention(*arrays, **{"implementation": "xla", **options})


def derivatives(function: Callable[..., jax.Array], *arrays: jax.Array) -> Any:
    """The output, its tangent and its gradients."""
    out, pull_back = jax.vjp(function, *arrays)
    along = tuple(jnp.sin(3 * array) for array in arrays)
    return out, jax.jvp(function, arrays, along)[1], pull_back(jnp.cos(jnp.arange(out.size)).reshape(out.shape))


def by_definition(seen: np.ndarray, *arrays: jax.Array, **options: Any) -> Any:
    """The same with a dense mask, `[B, N, T, S]`."""
    call = functools.partial(attend, implementation="reference", mask=jnp.asarray(seen), **options)
    return jit(functools.partial(derivatives, call))(*arrays)


def assert_near(got: Any, want: Any) -> None:
    sequences.assert_near(got, jax.tree.map(np.asarray, want), ROUNDED)


def hiding(function: Any, argument: str) -> dict[str, Any]:
    """A mask function as a `mask_mod`, or as a `score_mod` that chooses -inf."""
    choose = lambda logit, *indices: jnp.where(function(*indices), logit, -jnp.inf)
    return {argument: function if argument == "mask_mod" else choose}


def placed(mesh: Any, spec: PartitionSpec, arrays: Arrays) -> Arrays:
    return jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, spec)), arrays)


@cover(0, rest=2)
@pytest.mark.parametrize(
    ("name", "length", "options", "spec"),
    [
        ("block table", 1024, {}, P(None, "x")),
        ("block table", 1024, dict(argument="score_mod"), P("y", "x")),
        ("strided", 1040, {}, P(None, "x")),
        ("block table", 1024, {}, P("y", "x")),
        ("window of each head", 1024, {}, P("y", None, "x")),
        ("prefix of each entry", 1024, dict(sequence_strategy="gather"), P(None, "x")),
    ],
)
def test_sharded_jit(name: str, length: int, options: Any, spec: PartitionSpec) -> None:
    """Batch, heads and sequences split; indices are those of the whole call. Chunks need not begin with a tile."""
    function = mask_functions.families(length)[name]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    given = arrays(length)
    how = hiding(function, options.get("argument", "mask_mod"))
    others = {name: option for name, option in options.items() if name != "argument"}
    split = functools.partial(derivatives, functools.partial(attend, **how, **others))
    got = jit(split)(*placed(mesh, spec, given))
    assert_near(got, by_definition(mask_functions.dense(function, 2, HEADS, length, length), *given))


@pytest.mark.parametrize(
    ("strategy", "name", "argument", "options"),
    [
        ("gather", "strided", "mask_mod", {}),
        pytest.param("ring", "causal documents", "score_mod", {}, marks=cover(0)),
        pytest.param("ring", "causal documents", "mask_mod", dict(is_causal=True), marks=cover(0)),
        pytest.param("ring", "block table", "mask_mod", dict(segment_ids=True), marks=cover(0)),
        pytest.param("all_to_all", "window of each head", "mask_mod", {}, marks=cover(0)),
    ],
)
def test_shard_map(strategy: str, name: str, argument: str, options: Any) -> None:
    """With causality halves are traded, and the function still gets the indices of the whole sequences."""
    function, given = mask_functions.families(LENGTH)[name], arrays()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    segments = np.random.default_rng(1).integers(0, 3, (2, LENGTH // 64)).repeat(64, 1)
    operands = (*given, jnp.asarray(segments))

    def part(query: Any, key: Any, value: Any, segments: Any) -> Any:
        more = {**options, "segment_ids": segments} if "segment_ids" in options else options
        more |= hiding(function, argument)
        return attend(query, key, value, sequence_axis="x", sequence_strategy=strategy, **more)

    split = jax.shard_map(part, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"), check_vma=False)
    got = jit(lambda *all_: derivatives(lambda *three: split(*three, all_[3]), *all_[:3]))(*operands)
    seen = mask_functions.dense(function, 2, HEADS, LENGTH, LENGTH)
    whole = {**options, "segment_ids": operands[3]} if "segment_ids" in options else options
    assert_near(got, by_definition(seen, *given, **whole))


def test_shard_map_says_what_it_needs() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    part = lambda *arrays: attend(*arrays, mask_mod=lambda b, h, q, k: k <= q + h, sequence_axis="x")
    with pytest.raises(NotImplementedError, match=r"`mask_mod` inside jax.shard_map needs .*check_vma=False"):
        jax.shard_map(part, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))(*arrays(16))


@pytest.mark.parametrize("argument", ["mask_mod", pytest.param("score_mod", marks=cover(0))])
def test_vmap_of_a_closed_over_array(argument: str) -> None:
    """Each entry of the mapped axis has a map of its own, forward and backward."""
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (3, 640)), axis=1))
    query, key, value = arrays(640, 3)

    def one(ids: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        mask = lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q)
        how = (
            hiding(mask, argument) if not options else dict(options, mask=mask(0, 0, *jnp.ix_(*[jnp.arange(640)] * 2)))
        )
        return derivatives(functools.partial(attend, **how), query, key, value)

    got = jit(jax.vmap(one))(ids, query, key, value)
    assert_near(got, jit(jax.vmap(functools.partial(one, implementation="reference")))(ids, query, key, value))


@cover(0)
def test_second_order() -> None:
    """The gradient of a product of gradients, and of a tangent."""
    function, given = mask_functions.families(640)["strided"], arrays(640, 1)
    seen = jnp.asarray(mask_functions.dense(function, 1, 1, 640, 640))

    def second(attention: Callable[..., jax.Array]) -> Any:
        loss = lambda *arrays: jnp.sin(attention(*arrays)).sum()
        along = tuple(jnp.cos(array) for array in given)
        slope = lambda *arrays: (
            jax.jvp(loss, arrays, along)[1] + sum((g**2).sum() for g in jax.grad(loss, (0, 1, 2))(*arrays))
        )
        return jit(jax.grad(slope, (0, 1, 2)))(*given)

    want = second(functools.partial(attend, implementation="reference", mask=seen))
    sequences.assert_near(second(functools.partial(attend, mask_mod=function)), want, 1e-10)


def test_export() -> None:
    function, given = mask_functions.families(640)["images in text"], arrays(640, 1)
    exported = export.export(jax.jit(functools.partial(attend, mask_mod=function)))(*given)
    got = export.deserialize(exported.serialize()).call(*given)
    want = attend(*given, implementation="reference", mask=mask_functions.dense(function, 1, 1, 640, 640))
    assert_near(got, want)


@cover(0)
def test_dropout_drops_the_same() -> None:
    """What is not visited is not counted either."""
    function, given = mask_functions.families(640)["causal documents"], arrays(640)
    options = dict(dropout_rate=0.4, dropout_key=jax.random.key(0))
    got = jit(functools.partial(derivatives, functools.partial(attend, mask_mod=function, **options)))(*given)
    assert_near(got, by_definition(mask_functions.dense(function, 1, 1, 640, 640), *given, **options))


@cover(0)
def test_checkpoint_and_scan() -> None:
    """A function defined inside of a loop closes over what the loop carries."""
    function, given = mask_functions.families(640)["causal documents"], arrays(640)

    def loss(*arrays: jax.Array, **options: Any) -> jax.Array:
        def step(carry: Any, shift: Any) -> Any:
            mask = lambda b, h, q, k: (k + shift <= q) | function(b, h, q, k)
            how = options or dict(mask_mod=mask)
            if options:
                seen = jax.vmap(jax.vmap(lambda q, k: mask(0, 0, q, k), (None, 0)), (0, None))
                how = dict(options, mask=seen(*[jnp.arange(640, dtype=jnp.int32)] * 2))
            return attend(carry, *arrays[1:], **how), None

        return jnp.sin(jax.lax.scan(jax.checkpoint(step), arrays[0], jnp.arange(300, 500, 100))[0]).sum()

    got = jit(jax.grad(loss, (0, 1, 2)))(*given)
    assert_near(got, jit(jax.grad(functools.partial(loss, implementation="reference"), (0, 1, 2)))(*given))
