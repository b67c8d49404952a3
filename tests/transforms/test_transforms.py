"""Every transform of JAX around attention gives what the plain call gives: `reference`, one entry at a time."""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from operands import (
    ALL,
    PLAIN,
    Operands,
    assert_same,
    attend,
    attend_and_pull_back,
    cotangents,
    jit,
    loss,
    pull_back,
    reference,
    served,
    split,
    stack,
)
from refusals import skip_refused
from short_run import cover

import jflash

INPUTS = jax.random.normal(jax.random.key(5), (2, 5, 2, 8))


@pytest.fixture(autouse=True)
def _served(backend: str) -> None:
    skip_refused(backend, **PLAIN)


@cover(1, rest=2)
@pytest.mark.parametrize("operands", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("wrap", [lambda function: function, jit], ids=["eager", "jit"])
def test_value_and_gradients(backend: str, wrap: Callable[..., Any], operands: Operands) -> None:
    operands = served(operands, backend)
    got = wrap(functools.partial(attend_and_pull_back, implementation=backend))(operands)
    assert_same(got, reference(operands))


@cover(1, rest=2)
@pytest.mark.parametrize(
    ("result", "names"),
    [
        pytest.param(0, ("query",), marks=cover(0)),
        pytest.param(0, ("bias",), marks=cover(0)),
        (0, ("value", "sinks")),
        (1, ("modulation", "scale")),
    ],
    ids=["out-query", "out-bias", "out-value+sinks", "lse-modulation+scale"],
)
def test_gradient_of_some(backend: str, result: int, names: tuple[str, ...]) -> None:
    """A backend may leave work undone for gradients of one of the results, with respect to a few operands."""
    everything = served(ALL, backend)
    some = {name: everything[name] for name in names if name in everything}

    def weighted(some: Operands, implementation: str) -> jax.Array:
        results = attend({**everything, **some}, implementation)
        return jnp.where(jnp.isinf(results[result]), 0, results[result] * cotangents(results)[result]).sum()

    assert_same(
        *(jit(jax.grad(functools.partial(weighted, implementation=name)))(some) for name in (backend, "reference"))
    )


@cover(1, rest=2)
@pytest.mark.parametrize(
    "policy",
    [
        None,
        pytest.param(jax.checkpoint_policies.dots_saveable, marks=cover(0)),
        jax.checkpoint_policies.save_only_these_names("projected"),
    ],
    ids=["nothing", "dots", "names"],
)
def test_checkpoint(backend: str, policy: Any) -> None:
    smooth, rest = split(served(ALL, backend))

    def gradients(implementation: str) -> Operands:
        @functools.partial(jax.checkpoint, policy=policy)
        def checkpointed(smooth: Operands) -> jax.Array:
            query = checkpoint_name(jnp.tanh(smooth["query"]), "projected")
            return loss({**smooth, **rest, "query": query}, implementation)

        return jit(jax.grad(checkpointed))(smooth)

    assert_same(gradients(backend), gradients("reference"))


@cover(0)
def test_checkpoint_after_gradients_of_others(backend: str) -> None:
    """One differentiation leaves undone what was not asked for; another must not, though JAX has traced it."""
    everything = {name: array for name, array in ALL.items() if name not in ("modulation", "dropout_key")}
    smooth, _ = split(everything)

    def gradients(implementation: str, names: Iterable[str], wrap: Callable[..., Any]) -> Operands:
        scalar = wrap(lambda some: loss({**everything, **some}, implementation))
        return jit(jax.grad(scalar))({name: smooth[name] for name in names})

    plain = lambda function: function
    for names, wrap in ((smooth, plain), (("query",), plain), (smooth, jax.checkpoint), (("bias",), jax.checkpoint)):
        assert_same(gradients(backend, names, wrap), gradients("reference", names, wrap))


def layers(parameters: dict[str, jax.Array], inputs: jax.Array, implementation: str, *, scanned: bool) -> jax.Array:
    """Self-attention layers with residual connections, as one scan or as a Python loop."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        query, key, value = (x @ weights[name] for name in PLAIN)
        slopes = weights["slopes"]
        out = jflash.attention(query, key, value, is_causal=True, alibi_slopes=slopes, implementation=implementation)
        return x + out, None

    if scanned:
        return lax.scan(jax.checkpoint(layer), inputs, parameters)[0].sum()
    for index in range(len(parameters["slopes"])):
        inputs, _ = layer(inputs, jax.tree.map(lambda array, index=index: array[index], parameters))
    return inputs.sum()


def layer_parameters(seed: int, count: int = 3) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 4)
    weights = {name: 0.3 * jax.random.normal(key, (count, 8, 8)) for name, key in zip(PLAIN, keys, strict=False)}
    return {**weights, "slopes": jax.random.uniform(keys[3], (count, 2))}


@cover(every=2)
def test_scan_over_layers(backend: str) -> None:
    parameters = layer_parameters(0)
    got = jit(jax.value_and_grad(functools.partial(layers, implementation=backend, scanned=True)))(parameters, INPUTS)
    expected = jit(jax.value_and_grad(functools.partial(layers, implementation="reference", scanned=False)))
    assert_same(got, expected(parameters, INPUTS))


@cover(every=2)
def test_jit_vmap_grad_checkpoint_scan(backend: str) -> None:
    """A gradient for each example and each of two sets of parameters, through checkpointed layers in a scan."""
    parameters = [layer_parameters(seed) for seed in (0, 1)]
    gradient = jax.grad(functools.partial(layers, implementation=backend, scanned=True), argnums=(0, 1))
    got = jit(jax.vmap(jax.vmap(gradient, in_axes=(None, 0)), in_axes=(0, None)))(stack(parameters), INPUTS)
    plain = jit(jax.grad(functools.partial(layers, implementation="reference", scanned=False), argnums=(0, 1)))
    assert_same(got, stack([stack([plain(own, example) for example in INPUTS]) for own in parameters]))


@cover(every=2)
def test_scan_over_a_growing_cache(backend: str) -> None:
    """Decoding token by token with a traced offset is causal attention, row by row."""
    tokens, caches = (jax.random.normal(jax.random.key(seed), (2, 6, 2, 8)) for seed in (0, 1))

    def step(cache: jax.Array, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, query, entry = token
        cache = lax.dynamic_update_slice_in_dim(cache, entry[:, None], index, axis=1)
        out = jflash.attention(query[:, None], cache, cache, is_causal=True, query_offset=index, implementation=backend)
        return cache, out[:, 0]

    def decode(tokens: jax.Array, entries: jax.Array) -> jax.Array:
        rows = (jnp.arange(6), tokens.swapaxes(0, 1), entries.swapaxes(0, 1))
        # What a cache holds beyond its length must not matter.
        return lax.scan(step, jnp.full_like(entries, 1e4), rows)[1].swapaxes(0, 1)

    def whole(tokens: jax.Array, entries: jax.Array) -> jax.Array:
        return jflash.attention(tokens, entries, entries, is_causal=True, implementation="reference")

    def results(function: Callable[..., jax.Array]) -> Any:
        out, pull_back = jax.vjp(function, tokens, caches)
        return out, pull_back(cotangents((out, out))[0])

    assert_same(jit(lambda: results(decode))(), jit(lambda: results(whole))())


@cover(1)
@pytest.mark.parametrize("operands", [PLAIN, ALL], ids=["plain", "all"])
def test_export_round_trip(backend: str, operands: Operands) -> None:
    """Serialised with its derivative, read back, called, differentiated."""
    operands = served(operands, backend)
    # JAX gives no promise for other people's custom calls, and wants to hear that none is expected.
    unpromised = [jax.export.DisabledSafetyCheck.custom_call("jflash_metal_launch")] if backend == "metal" else []
    attend_here = jax.jit(functools.partial(attend, implementation=backend))
    exported = jax.export.export(attend_here, disabled_checks=unpromised)(operands)
    function = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_same(pull_back(function.call, operands), reference(operands))


def test_eval_shape(backend: str) -> None:
    out, lse = jax.eval_shape(functools.partial(attend, implementation=backend), served(ALL, backend))
    assert (out.shape, out.dtype) == ((2, 5, 4, 6), jnp.float32)
    assert (lse.shape, lse.dtype) == ((2, 5, 4), jnp.float32)


def test_donated_buffers(backend: str) -> None:
    query, key, value = (jax.random.normal(jax.random.key(seed), (2, 5, 4, 8)) for seed in range(3))
    expected = jflash.attention(query, key, value, implementation="reference")
    function = jax.jit(functools.partial(jflash.attention, implementation=backend), donate_argnums=0)
    got = function(query, key, value)
    assert query.is_deleted()
    assert_same(got, expected)


def compilations(caplog: pytest.LogCaptureFixture, function: Callable[..., Any], *args: Any) -> int:
    """Return how many programs XLA compiles for a call."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        function(*args)
    return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)


class Table:
    """A `score_mod` as function, bound method, callable object or pytree."""

    def __init__(self) -> None:
        self.table = jnp.arange(4.0)

    def __call__(self, logit: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return logit + self.table[head]

    def method(self, *scalars: Any) -> Any:
        return self(*scalars)


@cover(1)
@pytest.mark.parametrize(
    "form",
    [
        lambda table: lambda *scalars: table(*scalars),
        lambda table: table.method,
        lambda table: table,
        lambda table: jax.tree_util.Partial(lambda array, logit, batch, head, *_: logit + array[head], table.table),
    ],
    ids=["function", "method", "object", "pytree"],
)
def test_second_call_does_not_compile(backend: str, form: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Outside jit the code of a call is found again, also when `score_mod` reads another array by then."""
    table, other = Table(), jnp.ones(4)
    score_mod = form(table)
    skip_refused(backend, **PLAIN, score_mod=score_mod)

    def call(query: jax.Array) -> jax.Array:
        options = dict(score_mod=score_mod, dropout_rate=0.5, dropout_key=ALL["dropout_key"], local_window_size=3)
        return jflash.attention(query, ALL["key"], ALL["value"], implementation=backend, **options)

    jax.clear_caches()
    assert compilations(caplog, call, ALL["query"]) > 0
    assert compilations(caplog, call, ALL["query"]) == 0
    table.table = other
    assert compilations(caplog, call, ALL["query"]) == 0


@cover(every=2)
def test_second_gradient_does_not_compile(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    operands = {name: array for name, array in served(ALL, backend).items() if name != "modulation"}
    gradient = jax.grad(lambda query: attend({**operands, "query": query}, backend)[0].sum())
    jax.clear_caches()
    assert compilations(caplog, gradient, ALL["query"]) > 0
    assert compilations(caplog, gradient, ALL["query"]) == 0


# Every nesting without other operands is in test_derivatives.
@cover(every=4, rest=2)
@pytest.mark.parametrize("order", ["forward of reverse", "reverse of reverse", "forward", "reverse of forward"])
def test_other_modes(backend: str, order: str) -> None:
    """Other modes work for all operands at once, and mapped over directions."""
    smooth, rest = split(served(ALL, backend))
    directions = stack([jax.tree.map(jnp.cos, smooth), jax.tree.map(jnp.sin, smooth)])

    def derivative(direction: Operands, implementation: str) -> Any:
        scalar = lambda point: loss({**point, **rest}, implementation)
        push = lambda function: lambda point: jax.jvp(function, (point,), (direction,))[1]
        along = lambda point: sum(jnp.vdot(g, direction[name]) for name, g in jax.grad(scalar)(point).items())
        orders = {
            "forward": push(lambda point: attend({**point, **rest}, implementation)),
            "forward of reverse": push(jax.grad(scalar)),
            "reverse of reverse": jax.grad(along),
            "reverse of forward": jax.grad(push(scalar)),
        }
        return orders[order](smooth)

    got, want = (
        jit(jax.vmap(functools.partial(derivative, implementation=name)))(directions) for name in (backend, "reference")
    )
    assert_same(got, want)


@cover(0)
def test_no_tracer_outlives_its_trace(backend: str) -> None:
    operands = served({name: ALL[name] for name in (*PLAIN, "modulation")}, backend)
    with jax.checking_leaks():
        jax.eval_shape(functools.partial(attend_and_pull_back, implementation=backend), operands)
