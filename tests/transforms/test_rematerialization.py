"""Policies of `jax.checkpoint` find the residuals of attention by name, and those that keep them spare the forward."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equations import equations
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from operands import assert_same
from refusals import skip_refused
from short_run import cover

import jflash
from jflash import _dispatch

policies = jax.checkpoint_policies
NAMES = jflash.RESIDUAL_CHECKPOINT_NAMES
INPUTS = np.random.default_rng(0).standard_normal((8, 6, 2, 8)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32) / 3

offloaded = functools.partial(
    policies.save_and_offload_only_these_names,
    names_which_can_be_saved=[],
    offload_src="device",
    offload_dst="pinned_host",
)
KEPT: dict[str, Any] = {
    "saved": policies.save_only_these_names(*NAMES),
    "any name": policies.save_any_names_but_these("another"),
    "offloaded": offloaded(names_which_can_be_offloaded=[*NAMES]),
    "both": policies.save_from_both_policies(
        policies.save_only_these_names(NAMES[0]), policies.save_only_these_names(NAMES[1])
    ),
}
FORGOTTEN: dict[str, Any] = {
    "nothing": policies.nothing_saveable,
    "another name": policies.save_only_these_names("context"),
    "output alone": policies.save_only_these_names(NAMES[0]),
    "all but these": policies.save_any_names_but_these(*NAMES),
}

Layer = Callable[[Any, Any], Any]
"""A function of inputs and one layer's weights."""


def layer(inputs: Any, weights: Any, **options: Any) -> Any:
    """Attention between two nonlinear functions, whose derivatives want their arguments.

    It has sinks, as the backward of whole rows wants no residual without them.
    """
    heads = jnp.tanh(inputs @ weights)
    return jnp.sin(jflash.attention(heads, heads, heads, is_causal=True, sinks=jnp.ones(2), **options))


def one(layer: Layer, inputs: Any, weights: Any) -> Any:
    return layer(inputs, weights[0])


def scanned(layer: Layer, inputs: Any, weights: Any) -> Any:
    return lax.scan(lambda inputs, weights: (layer(inputs, weights), None), inputs, weights)[0]


def mapped(layer: Layer, inputs: Any, weights: Any) -> Any:
    return jax.vmap(lambda inputs: layer(inputs, weights[0]))(inputs)


def on_two_devices(layer: Layer, inputs: Any, weights: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    return layer(lax.with_sharding_constraint(inputs, NamedSharding(mesh, PartitionSpec("batch"))), weights[0])


def in_shard_map(layer: Layer, inputs: Any, weights: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("sequence",))
    split, whole = PartitionSpec(None, "sequence"), PartitionSpec()
    return jax.shard_map(layer, mesh=mesh, in_specs=(split, whole), out_specs=split)(inputs, weights[0])


MODELS = {"jit": one, "scan": scanned, "vmap": mapped, "sharded": on_two_devices, "shard_map": in_shard_map}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each forward of `xla` is a call of Python, which a compiled program shows."""
    module = _dispatch.BACKENDS["xla"]
    forward = module.forward

    def called(spec: Any, operands: Any) -> Any:
        out, lse = forward(spec, operands)
        return jax.pure_callback(lambda *same: same, (out, lse), out, lse)

    jax.clear_caches()
    monkeypatch.setattr(module, "forward", called)
    yield
    jax.clear_caches()


def forwards(function: Callable[..., Any], *arguments: Any) -> int:
    """How many there are in the compiled value and gradient."""
    gradient = jax.value_and_grad(lambda *arguments: jnp.sum(function(*arguments)), argnums=(0, 1))
    text = jax.jit(gradient).lower(*arguments).compile().as_text()
    return text.count('custom_call_target="xla_ffi_python_cpu_callback"') + text.count('entry = "forward"')


@contextlib.contextmanager
def remat3(enabled: bool) -> Iterator[None]:
    """JAX's next implementation of `jax.checkpoint`."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def checkpointed(policy: Any, **options: Any) -> Layer:
    return jax.checkpoint(functools.partial(layer, **{"implementation": "xla", **options}), policy=policy)


NEXT_REMAT = pytest.mark.parametrize("next_remat", [False, pytest.param(True, marks=cover(0))])


@pytest.mark.parametrize("policy", [*KEPT, *FORGOTTEN])
@NEXT_REMAT
@pytest.mark.usefixtures("counted")
def test_forward_runs_again_only_where_a_policy_forgets(policy: str, next_remat: bool) -> None:
    with remat3(next_remat):
        found = forwards(functools.partial(one, checkpointed((KEPT | FORGOTTEN)[policy])), INPUTS, WEIGHTS)
    assert found == (1 if policy in KEPT else 2)


@cover(1, rest=2)
@pytest.mark.parametrize("model", [*MODELS])
@pytest.mark.parametrize("policy", ["saved", "offloaded", "nothing"])
@pytest.mark.parametrize("next_remat", [False, True])
@pytest.mark.usefixtures("counted")
def test_forward_runs_once_under_every_transform(model: str, policy: str, next_remat: bool) -> None:
    """A loop over layers counts by its body."""
    if next_remat and model == "vmap" and policy in KEPT and jax.__version_info__ < (0, 12):
        pytest.skip("jax_remat3 of jax 0.11 forgets names in a vmap, those in functions of JAX alone too.")
    options = dict(sequence_axis="sequence", sequence_strategy="gather") if model == "shard_map" else {}
    with remat3(next_remat):
        layer = checkpointed((KEPT | FORGOTTEN)[policy], **options)
        found = forwards(functools.partial(MODELS[model], layer), INPUTS, WEIGHTS)
    assert found == (1 if policy in KEPT else 2)


@pytest.mark.parametrize("outermost", ["saved", "nothing"])
@NEXT_REMAT
@pytest.mark.usefixtures("counted")
def test_forward_runs_once_in_a_checkpoint_of_a_checkpoint(outermost: str, next_remat: bool) -> None:
    """Where both keep the names; what the outer one forgets runs again."""

    def two(inputs: Any, weights: Any) -> Any:
        inner = checkpointed(KEPT["saved"])
        both = lambda inputs, weights: inner(inner(inputs, weights[0]), weights[1])
        return jax.checkpoint(both, policy=(KEPT | FORGOTTEN)[outermost])(inputs, weights)

    with remat3(next_remat):
        found = forwards(two, INPUTS, WEIGHTS)
    assert found == 2 if outermost in KEPT else found >= 4


@pytest.mark.parametrize(
    ("name", "saved", "expected"),
    [
        ("context", ["context"], 1),
        (("context", "statistics"), ["context", "statistics"], 1),
        (("context", "statistics"), ["context"], 2),
        ("context", [*NAMES], 2),
    ],
)
@pytest.mark.usefixtures("counted")
def test_caller_chooses_the_name(name: Any, saved: list[str], expected: int) -> None:
    layer = checkpointed(policies.save_only_these_names(*saved), residual_checkpoint_name=name)
    assert forwards(functools.partial(one, layer), INPUTS, WEIGHTS) == expected


@pytest.mark.parametrize("policy", ["saved", "offloaded", "nothing"])
def test_kernels_of_a_backend(policy: str) -> None:
    """Metal's, which its emulator compiles and counts by their entry points."""
    heads = jax.ShapeDtypeStruct(INPUTS.shape, jnp.float32)
    skip_refused("metal", heads, heads, heads)
    layer = checkpointed((KEPT | FORGOTTEN)[policy], implementation="metal")
    assert forwards(functools.partial(one, layer), INPUTS, WEIGHTS) == (1 if policy in KEPT else 2)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("policy", ["saved", pytest.param("offloaded", marks=cover(0))])
def test_gradients_are_the_same(implementation: str, policy: str) -> None:
    def gradients(wrap: Callable[[Layer], Layer]) -> Any:
        wrapped = wrap(functools.partial(layer, implementation=implementation))
        return jax.jit(jax.grad(lambda *arguments: scanned(wrapped, *arguments).sum(), argnums=(0, 1)))(INPUTS, WEIGHTS)

    assert_same(gradients(functools.partial(jax.checkpoint, policy=KEPT[policy])), gradients(lambda layer: layer))


def test_names_of_the_definition() -> None:
    """The backward begins with the softmax in any case; what comes after attention finds the output."""
    traced = jax.make_jaxpr(functools.partial(layer, implementation="reference"))(INPUTS, WEIGHTS[0])
    found = [equation.params["name"] for equation in equations(traced.jaxpr) if equation.primitive.name == "name"]
    assert found == [*NAMES]


@pytest.mark.parametrize("name", [None, 3, ("context",), ("context", None), ("a", "b", "c")])
@pytest.mark.parametrize("function", [jflash.attention, jflash.explain])
def test_what_is_no_name_is_refused(function: Callable[..., Any], name: Any) -> None:
    with pytest.raises(TypeError, match="`residual_checkpoint_name` must be a name"):
        function(INPUTS, INPUTS, INPUTS, residual_checkpoint_name=name)
