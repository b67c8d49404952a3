"""`jflash.keras`: what keras.layers.MultiHeadAttention and GroupQueryAttention give, from the same weights."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from layers import assert_same_layer, filled, normal
from short_run import cover

import jflash
import jflash.keras

BATCH, LENGTH, KEY_LENGTH, FEATURES = 2, 13, 17, 12
OWN = {"mha": keras.layers.MultiHeadAttention, "gqa": keras.layers.GroupQueryAttention}
ADAPTED = {"mha": jflash.keras.MultiHeadAttention, "gqa": jflash.keras.GroupQueryAttention}
SIZES = {"mha": dict(num_heads=4, key_dim=6), "gqa": dict(head_dim=6, num_query_heads=4, num_key_value_heads=2)}
pytestmark = [
    # Keras' own, of NumPy's newest release and of GroupQueryAttention's sublayers.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*was passed an input with a mask attached:UserWarning"),
]
both_kinds = pytest.mark.parametrize("kind", OWN)

SELF = (normal(1, (BATCH, LENGTH, FEATURES)),) * 2
CROSS = (
    normal(1, (BATCH, LENGTH, FEATURES)),
    normal(2, (BATCH, KEY_LENGTH, FEATURES)),
    normal(3, (BATCH, KEY_LENGTH, 9)),
)
FIRST = np.arange(KEY_LENGTH) == 0
ANY_MASK = (normal(4, (BATCH, LENGTH, KEY_LENGTH)) > 0) | FIRST
HEAD_MASK = (normal(4, (BATCH, 4, LENGTH, KEY_LENGTH)) > 0) | FIRST
KEY_PADDING = np.arange(KEY_LENGTH) < np.array([[9], [17]])


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer's kind and inputs, what it is made with and what it is called with."""

    kind: str
    inputs: tuple[np.ndarray, ...] = SELF
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "gqa: padding of keys, causal": Case("gqa", CROSS, {}, {"key_mask": KEY_PADDING, "use_causal_mask": True}),
    "mha: no mask": Case("mha"),
    "mha: causal": Case("mha", call={"use_causal_mask": True}),
    "mha: cross attention, a mask, causal, another value size": Case(
        # Keras' fused path takes no other value size; with dropout it has another.
        "mha",
        CROSS,
        {"value_dim": 5, "output_shape": 10, "dropout": 0.5},
        {"attention_mask": ANY_MASK, "use_causal_mask": True},
    ),
    "mha: a mask per head, of numbers": Case("mha", CROSS, {}, {"attention_mask": HEAD_MASK.astype(np.int32)}),
    "mha: padding of keys and values": Case(
        "mha", CROSS, {"use_bias": False}, {"value_mask": KEY_PADDING, "key_mask": KEY_PADDING | (np.arange(17) < 11)}
    ),
    "mha: bfloat16": Case("mha", options={"dtype": "bfloat16"}, call={"use_causal_mask": True}),
    "mha: dropout, not training": Case("mha", options={"dropout": 0.5}, call={"use_causal_mask": True}),
    "gqa: causal": Case("gqa", call={"use_causal_mask": True}),
    "gqa: cross attention, a mask": Case("gqa", CROSS, {}, {"attention_mask": ANY_MASK}),
    "gqa: one key head, bfloat16": Case("gqa", options={"num_key_value_heads": 1, "dtype": "bfloat16"}),
    "mha: window": Case("mha", options={"sliding_window": 4}, call={"use_causal_mask": True}),
    "gqa: window, gate": Case("gqa", options={"sliding_window": 4, "use_gate": True}),
}


def made(layer: type, case: Case, **options: Any) -> Any:
    built = layer(**{**SIZES[case.kind], **case.options, **options})
    query, value, *key = (array.shape for array in case.inputs)
    built.build(query, value, *key)
    return built


def as_function(layer: Any, **call: Any) -> Callable[[Any, Any], jax.Array]:
    """Return the layer as a function of the list of its weights and of its inputs."""
    state = [variable.value for variable in layer.non_trainable_variables]
    return lambda weights, inputs: layer.stateless_call(weights, state, *inputs, **call)[0]


def in_float64(case: Case) -> Any:
    """Keras' own layer; with dropout, as without it Keras calls jax.nn, whose softmax is in float32."""
    with jax.enable_x64(True):
        return made(OWN[case.kind], case, dtype="float64", dropout=0.5)


def known(case: Case) -> bool:
    """Return whether this release of Keras knows the case's options."""
    return case.options.keys() <= {*inspect.signature(OWN[case.kind].__init__).parameters, "dtype"}


@cover(every=13)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if known(case)])
def test_values_and_gradients_are_those_of_the_base_class(case: Case) -> None:
    own, adapted = made(OWN[case.kind], case), made(ADAPTED[case.kind], case)
    assert [weight.path.split("/", 1)[1:] for weight in adapted.weights] == [
        weight.path.split("/", 1)[1:] for weight in own.weights
    ]
    weights = filled([weight.value for weight in own.trainable_variables])
    inputs = tuple(x.astype(own.compute_dtype) for x in case.inputs)
    functions = (as_function(layer, **case.call) for layer in (adapted, own, in_float64(case)))
    assert_same_layer(*functions, weights, inputs)


@cover(0)
@both_kinds
def test_padding_that_keras_hands_on(kind: str) -> None:
    """`Masking` hides padded keys, and padded queries take no part in the sums."""
    case = Case(kind)
    inputs = SELF[0] * (np.arange(LENGTH) < np.array([[9], [13]]))[..., None]

    def masked(layer: Any) -> Callable[[Any, Any], jax.Array]:
        given = keras.Input((LENGTH, FEATURES), dtype=layer.compute_dtype)
        seen = keras.layers.Masking(dtype=layer.compute_dtype)(given)
        apply = as_function(keras.Model(given, layer(seen, seen)))
        return lambda weights, inputs: apply(weights, inputs) * jnp.any(inputs[0] != 0, axis=-1, keepdims=True)

    own, adapted = made(OWN[kind], case), made(ADAPTED[kind], case)
    weights = filled([weight.value for weight in own.trainable_variables])
    assert_same_layer(*map(masked, (adapted, own, in_float64(case))), weights, (inputs,))
    plain = as_function(adapted)(weights, (inputs, inputs))
    assert jnp.abs(masked(adapted)(weights, (inputs,)) - plain)[0, :9].max() > 0.1, "the mask came"


@cover(0)
@pytest.mark.parametrize("kind", ["mha", pytest.param("gqa", marks=cover(0))])
def test_dropout_of_the_layers(kind: str) -> None:
    layer = made(ADAPTED[kind], Case(kind, options={"dropout": 0.25, "seed": 1}))
    same_seed = made(ADAPTED[kind], Case(kind, options={"dropout": 0.25, "seed": 1}))
    for each in (layer, same_seed):
        for variable, value in zip(each.trainable_variables, filled(each.trainable_variables), strict=True):
            variable.assign(value)
    expected = layer(*SELF, use_causal_mask=True)
    first, second = (layer(*SELF, use_causal_mask=True, training=True) for _ in range(2))
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(first, same_seed(*SELF, use_causal_mask=True, training=True))
    assert jnp.array_equal(expected, layer(*SELF, use_causal_mask=True, training=False))

    @jax.jit
    def draw(seed: jax.Array) -> jax.Array:
        state = [seed.astype(variable.dtype) for variable in layer.non_trainable_variables]
        weights = [variable.value for variable in layer.trainable_variables]
        return layer.stateless_call(weights, state, *SELF, use_causal_mask=True, training=True)[0]

    draws = jax.vmap(draw)(jax.random.bits(jax.random.key(0), (400, 2), jnp.uint32))
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert jnp.all(jnp.abs(draws.mean(axis=0) - expected) < 5 * standard_error + 1e-6)


def model(layer: Any) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedded = keras.layers.Embedding(7, FEATURES, mask_zero=True)(tokens)
    return keras.Model(tokens, keras.layers.Dense(7)(layer(embedded, embedded, use_causal_mask=True)))


@cover(0)
@pytest.mark.parametrize("kind", ["mha", pytest.param("gqa", marks=cover(0))])
def test_a_model_is_trained_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 7, (16, LENGTH), np.int32)
    tokens[:8, 9:] = 0
    trained = model(ADAPTED[kind](**SIZES[kind], dropout=0.1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.Adam(0.03), loss)
    losses = trained.fit(tokens, tokens, epochs=24, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]

    trained.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert any(type(layer) is ADAPTED[kind] for layer in loaded.layers)
    np.testing.assert_array_equal(loaded.predict(tokens, verbose=0), trained.predict(tokens, verbose=0))

    own = model(OWN[kind](**SIZES[kind], dropout=0.1))
    trained.save_weights(tmp_path / "model.weights.h5")
    own.load_weights(tmp_path / "model.weights.h5")
    seen = tokens != 0
    ours, theirs = (each.predict(tokens, verbose=0)[seen] for each in (trained, own))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@cover(0)
@both_kinds
def test_keys_and_values_are_not_repeated(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = {}

    def record(query: jax.Array, key: jax.Array, value: jax.Array, **named: Any) -> jax.Array:
        called.update(named, heads=key.shape[2])
        return query

    monkeypatch.setattr(jflash.keras, "attention", record)
    made(ADAPTED[kind], Case(kind))(*SELF, use_causal_mask=True)
    assert called["heads"] == SIZES[kind].get("num_key_value_heads", 4)
    assert called["is_causal"]
    assert (called["mask"], called["segment_ids"]) == (None, None)


def test_what_cannot_be_honoured_is_refused() -> None:
    for kind in OWN:
        with pytest.raises(NotImplementedError, match="`return_attention_scores=True`"):
            made(ADAPTED[kind], Case(kind))(*SELF, return_attention_scores=True)
    images = np.ones((1, 3, 4, FEATURES), np.float32)
    layer = ADAPTED["mha"](**SIZES["mha"])
    for call in (dict(use_causal_mask=True), dict(value_mask=np.ones((1, 3), bool))):
        with pytest.raises(NotImplementedError, match=r"attends over \(1, 2\) of heads of shape \(1, 3, 4, 4, 6\)"):
            layer(images, images, **call)


IMAGES = normal(1, (BATCH, 3, 4, FEATURES)), normal(2, (BATCH, 3, 5, FEATURES))
BOTH_AXES = normal(4, (BATCH, 3, 4, 3, 5)) > -1
AXES = {
    "all": (None, IMAGES, {}),
    "all, a mask of pairs": (None, IMAGES, dict(attention_mask=BOTH_AXES)),
    "all, a mask for each head": (None, IMAGES, dict(attention_mask=BOTH_AXES[:, None].repeat(4, 1))),
    "all, a mask of columns": (None, IMAGES, dict(attention_mask=BOTH_AXES[:, :1, :1, :1])),
    "second": ((2,), IMAGES, {}),
    "second, from behind, a mask": ((-2,), IMAGES, dict(attention_mask=BOTH_AXES[:, 0, :, 0])),
    "first, causal": ((1,), IMAGES[:1] * 2, dict(use_causal_mask=True)),
    "first, padding": ((1,), IMAGES[:1] * 2, dict(value_mask=np.arange(3) < np.array([[2], [3]]))),
    "volume": ((1, 3), (normal(1, (BATCH, 2, 3, 4, FEATURES)),) * 2, {}),
}


@pytest.mark.parametrize("name", AXES)
def test_attention_over_chosen_axes(name: str) -> None:
    """As the base class, from the same weights; with dropout, so that Keras computes by einsums."""
    axes, inputs, call = AXES[name]
    own, adapted = (kind["mha"](**SIZES["mha"], attention_axes=axes, dropout=0.1) for kind in (OWN, ADAPTED))
    want = own(*inputs, **call)
    adapted(*inputs, **call)
    adapted.set_weights(own.get_weights())
    np.testing.assert_allclose(adapted(*inputs, **call), want, atol=1e-5)


@cover(0)
def test_a_layer_of_keras_is_served_by_replacing_jax_nn() -> None:
    layer = made(OWN["mha"], Case("mha"))
    theirs = layer(*SELF, use_causal_mask=True)
    with jflash.replacing_jax_nn() as replaced:
        ours = layer(*SELF, use_causal_mask=True)
    assert (replaced.served, replaced.left) == (1, [])
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@cover(0)
def test_keras_is_imported_by_its_adapter_only_and_its_absence_explained() -> None:
    script = """
import sys
import jflash
assert "keras" not in sys.modules
sys.modules["keras"] = None  # as if it were not installed
import jflash.keras
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: jflash.keras needs Keras: pip install 'jflash[keras]'" in ran.stderr


@cover(0)
@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_another_backend_is_refused(backend: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import jflash.keras"],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ImportError: jflash.keras needs Keras' JAX backend: set KERAS_BACKEND=jax" in ran.stderr


class Inside(keras.layers.Layer):
    """A model's own layer, whose shapes Keras infers by calling it. It takes rows that are negative for padding."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs, inputs, value_mask=inputs.max(-1) >= 0, use_causal_mask=True)


@both_kinds
@pytest.mark.parametrize("shape", [(LENGTH, FEATURES), (None, FEATURES)], ids=["open batch", "open length"])
def test_shapes_that_are_open(kind: str, shape: tuple[int | None, int]) -> None:
    inner = ADAPTED[kind](**SIZES[kind])
    inputs = keras.Input(shape)
    model = keras.Model(inputs, Inside(inner)(inputs))
    assert model.output_shape == (None, *shape)
    padded = np.where(np.arange(LENGTH)[:, None] == 7, -1, SELF[0]).astype(np.float32)
    want = inner(padded, padded, value_mask=padded.max(-1) >= 0, use_causal_mask=True)
    np.testing.assert_array_equal(model(padded), want)


@both_kinds
@pytest.mark.parametrize("heads", [False, True], ids=["mask", "mask for each head"])
def test_attention_that_a_subclass_calls(kind: str, heads: bool) -> None:
    """`_compute_attention` is where Keras lets subclasses in: with a mask of theirs, or none, and causal."""
    case = Case(kind)
    own, adapted = made(OWN[kind], case), made(ADAPTED[kind], case)
    query, key = normal(1, (BATCH, LENGTH, 4, 6)), normal(2, (BATCH, LENGTH, 4, 6))
    seen = np.tri(LENGTH, dtype=bool) & ((normal(4, (BATCH, 4, LENGTH, LENGTH)) > 0) | np.eye(LENGTH, dtype=bool))
    seen = seen if heads else seen[:, 0]
    arrays = tuple(map(jnp.asarray, (query, key, key)))
    want = own._compute_attention(*arrays, attention_mask=jnp.asarray(seen))[0]
    for mask in (seen, seen.astype(np.int32)):
        got = adapted._compute_attention(*arrays, attention_mask=jnp.asarray(mask))[0]
        np.testing.assert_allclose(got, want, atol=1e-5)
    causal = adapted._compute_attention(*arrays, use_causal_mask=True)[0]
    want = own._compute_attention(*arrays, attention_mask=jnp.tri(LENGTH, dtype=bool)[None])[0]
    np.testing.assert_allclose(causal, want, atol=1e-5)
