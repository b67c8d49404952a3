"""`jflash.equinox.MultiheadAttention`: what equinox.nn.MultiheadAttention gives, from the same parameters."""

import dataclasses
import functools
import inspect
import subprocess
import sys
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import Apply, assert_same_layer, assert_same_output, filled, normal
from short_run import cover

import jflash
import jflash.equinox

HEADS, LENGTH, KEY_LENGTH = 4, 13, 17
SIZE = 12
OWN, ADAPTED = equinox.nn.MultiheadAttention, jflash.equinox.MultiheadAttention


def as_function(kind: type, call: dict[str, Any], **options: Any) -> tuple[Apply, Any]:
    """A layer as a function of the list of its arrays, so that either kind takes the other's, and such a list."""
    layer = equinox.filter_eval_shape(functools.partial(kind, HEADS, SIZE, **options), key=jax.random.key(0))
    shapes, rest = equinox.partition(layer, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    shapes, tree = jax.tree.flatten(shapes)
    return lambda leaves, inputs: equinox.combine(tree.unflatten(leaves), rest)(*inputs, **call), filled(shapes)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer's inputs, what it is made with and what it is called with."""

    inputs: tuple[np.ndarray, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)


def turn(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """Give query and key the position, as rotary embeddings do, and the value something else."""
    position = np.cos(np.arange(LENGTH, dtype=np.float32))[:, None, None]
    return query * position, key * position, jnp.flip(value, axis=1)


SELF = tuple(normal(seed, (LENGTH, SIZE)) for seed in (1, 2, 3))
CROSS = (normal(1, (LENGTH, SIZE)), normal(2, (KEY_LENGTH, 7)), normal(3, (KEY_LENGTH, 9)))
CROSS_SIZES = {"key_size": 7, "value_size": 9, "output_size": 10, "qk_size": 6, "vo_size": 5}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
CAUSAL = np.tri(LENGTH, dtype=bool)
ANY_MASK = (normal(4, (HEADS, LENGTH, KEY_LENGTH)) > 0) | np.eye(LENGTH, KEY_LENGTH, dtype=bool)

CASES = {
    "a mask of numbers": Case(CROSS, CROSS_SIZES, {"mask": ANY_MASK.astype(jnp.float32)}),
    "one mask": Case(SELF, BIASES, {"mask": CAUSAL}),
    "cross attention, no mask": Case(CROSS, CROSS_SIZES),
    "cross attention, a mask per head": Case(CROSS, CROSS_SIZES | BIASES, {"mask": ANY_MASK}),
    "process_heads": Case(SELF, {"qk_size": 4, "vo_size": 6}, {"mask": CAUSAL, "process_heads": turn}),
    "bfloat16": Case(tuple(x.astype(jnp.bfloat16) for x in SELF), BIASES | {"dtype": jnp.bfloat16}, {"mask": CAUSAL}),
}


@cover(every=4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_base_class(case: Case) -> None:
    own, parameters = as_function(OWN, case.call, **case.options)
    adapted, _ = as_function(ADAPTED, case.call, **case.options)
    assert_same_layer(adapted, own, own, parameters, case.inputs)


@cover(0)
def test_a_batch_by_vmap() -> None:
    masks = (normal(5, (3, LENGTH, LENGTH)) > 0) | np.eye(LENGTH, dtype=bool)
    inputs = tuple(normal(seed, (3, LENGTH, SIZE)) for seed in (1, 2, 3))

    def batched(kind: type) -> tuple[Apply, Any]:
        one = lambda mask: as_function(kind, {"mask": mask})
        apply = lambda leaves, inputs: jax.vmap(lambda mask, *each: one(mask)[0](leaves, each))(masks, *inputs)
        return apply, one(None)[1]

    own, parameters = batched(OWN)
    assert_same_layer(batched(ADAPTED)[0], own, own, parameters, inputs)


def test_heads_of_unlike_dtypes() -> None:
    """Tables in float32 leave query and key in it, and the value in bfloat16."""
    own, parameters = as_function(OWN, {"process_heads": turn}, dtype=jnp.bfloat16)
    adapted, _ = as_function(ADAPTED, {"process_heads": turn}, dtype=jnp.bfloat16)
    assert_same_output(adapted, own, parameters, tuple(x.astype(jnp.bfloat16) for x in SELF))


BAND = CAUSAL & ~np.tri(LENGTH, k=-4, dtype=bool)
SEGMENTS = np.repeat([0, 1, 2], [5, 1, 7])
OPTIONS = {
    "is_causal": ({"is_causal": True}, CAUSAL),
    "local_window_size": ({"local_window_size": (3, 0)}, BAND),
    "segment_ids": ({"segment_ids": SEGMENTS}, SEGMENTS[:, None] == SEGMENTS),
    "key_value_seq_lengths": (
        {"key_value_seq_lengths": np.array(9)},
        np.broadcast_to(np.arange(LENGTH) < 9, CAUSAL.shape),
    ),
}


@cover(0)
@pytest.mark.parametrize(("options", "mask"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_is_the_mask_it_stands_for(options: dict[str, Any], mask: jax.Array) -> None:
    own, parameters = as_function(OWN, {"mask": mask})
    adapted, _ = as_function(ADAPTED, options)
    assert_same_output(adapted, own, parameters, SELF)


def test_every_argument_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    called = {}

    def record(query: jax.Array, key: jax.Array, value: jax.Array, **named: Any) -> jax.Array:
        called.update(named)
        return value

    monkeypatch.setattr(jflash.equinox, "attention", record)
    given = {name: object() for name in jflash.equinox.Options.__annotations__}
    layer = ADAPTED(HEADS, SIZE, dropout_p=0.5, key=jax.random.key(0))
    mask, key, reproducible = None, object(), object()
    layer(*SELF, mask, key=key, reproducible=reproducible, **given)
    own = {"mask": mask, "dropout_key": key, "dropout_rate": 0.5, "deterministic": reproducible}
    assert called == given | own
    assert set(called) == set(inspect.signature(jflash.attention).parameters) - {
        "query",
        "key",
        "value",
        # Equinox's layer, too, draws for each head.
        "broadcast_dropout",
        "return_residual",
        # The layer projects its own keys and values; those of pages are a server's.
        "page_table",
        "k_scale",
        "v_scale",
    }


@cover(0)
def test_dropout_drops_at_the_rate_and_for_each_head_anew() -> None:
    """The output is, with equal logits and identities for projections, the probabilities of both heads side by side."""
    rate, length = 0.25, 96
    layer = ADAPTED(2, length, output_size=2 * length, vo_size=length, dropout_p=rate, key=jax.random.key(0))
    weights = lambda layer: (layer.query_proj.weight, layer.value_proj.weight, layer.output_proj.weight)
    values = jnp.tile(jnp.eye(length), (2, 1))
    layer = equinox.tree_at(weights, layer, (jnp.zeros_like(layer.query_proj.weight), values, jnp.eye(2 * length)))
    inputs = jnp.eye(length)
    out = layer(inputs, inputs, inputs, key=jax.random.key(0))
    kept = out > 0
    np.testing.assert_allclose(out[kept], 1 / (length * (1 - rate)), rtol=1e-5)
    both = kept[:, :length] & kept[:, length:]
    for drawn, expected in ((kept, 1 - rate), (both, (1 - rate) ** 2)):
        assert abs(drawn.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / drawn.size)


@cover(0)
def test_dropout_of_the_layer() -> None:
    layer = ADAPTED(HEADS, SIZE, dropout_p=0.25, key=jax.random.key(0))
    draw = equinox.filter_jit(lambda key, **call: layer(*SELF, CAUSAL, key=key, **call))
    expected = ADAPTED(HEADS, SIZE, key=jax.random.key(0))(*SELF, CAUSAL)

    first, again, other = draw(jax.random.key(1)), draw(jax.random.key(1)), draw(jax.random.key(2))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
    draws = jax.vmap(draw)(jax.random.split(jax.random.key(3), 400))
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert jnp.all(jnp.abs(draws.mean(axis=0) - expected) < 5 * standard_error)

    assert jnp.array_equal(layer(*SELF, CAUSAL, inference=True), expected)
    silent = equinox.nn.inference_mode(layer)
    assert jnp.array_equal(silent(*SELF, CAUSAL), expected)
    assert not jnp.array_equal(silent(*SELF, CAUSAL, key=jax.random.key(1), inference=False), expected)
    with pytest.warns(UserWarning, match="`inference`"):
        assert jnp.array_equal(layer(*SELF, CAUSAL, deterministic=True), expected)


REFUSALS = {
    "dropout without a key": ({"dropout_p": 0.1}, {}, RuntimeError, r"`key`.*dropout_p=0\.1"),
    "process_heads that changes a shape": (
        {},
        {"process_heads": lambda q, k, v: (q, k, v[:, :, :2])},
        ValueError,
        r"`process_heads`.*\(13, 4, 2\)",
    ),
}


@pytest.mark.parametrize(("options", "call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_wrong_is_refused(options: Any, call: Any, error: type[Exception], message: str) -> None:
    apply, parameters = as_function(ADAPTED, call, **options)
    with pytest.raises(error, match=message):
        apply(parameters, SELF)


@cover(0)
def test_equinox_is_imported_by_its_adapter_only_and_its_absence_explained() -> None:
    script = """
import sys
import jflash
assert not {"flax", "equinox"} & set(sys.modules)
sys.modules["equinox"] = None  # as if it were not installed
import jflash.equinox
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: jflash.equinox needs Equinox: pip install 'jflash[equinox]'" in ran.stderr
