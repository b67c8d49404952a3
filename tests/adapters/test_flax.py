"""`jflash.flax.attention_fn` inside the layers of flax.nnx and flax.linen: what their own attention gives."""

import dataclasses
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_layers import (
    FEATURES,
    FRAMEWORKS,
    HEAD_DIM,
    HEADS,
    LENGTH,
    Layer,
    both_frameworks,
    causal_mask,
    linen_layer,
    nnx_layer,
    self_attention,
)
from layers import assert_same_layer, assert_same_output, normal
from short_run import cover

import jflash
import jflash.flax
from jflash.flax import attention_fn


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer's inputs, its mask, and what else it is made and called with."""

    inputs: tuple[np.ndarray, ...]
    mask: Callable[[], Any] = lambda: None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    call: dict[str, Any] = dataclasses.field(default_factory=dict)


KEY_LENGTH = 17
CROSS = (normal(1, (2, LENGTH, FEATURES)), normal(2, (2, KEY_LENGTH, 9)), normal(3, (2, KEY_LENGTH, 9)))


def any_mask() -> np.ndarray:
    """Every query sees the first key, under `is_causal` too: where it sees none, Flax's result is another."""
    return (normal(4, (2, HEADS, LENGTH, KEY_LENGTH)) > 0) | (np.arange(KEY_LENGTH) == 0)


CASES = {
    "nnx: no mask, no batch axes": (nnx_layer, Case(self_attention())),
    "nnx: float32 causal mask": (nnx_layer, Case(self_attention(2), lambda: causal_mask(2))),
    "nnx: is_causal": (nnx_layer, Case(self_attention(2), call={"is_causal": True})),
    "nnx: bool mask, several batch axes, grouped heads": (
        nnx_layer,
        Case(self_attention(2, 3), lambda: causal_mask(2, 3, dtype=bool), {"num_kv_heads": 2}),
    ),
    "nnx: cross attention, a mask per head and is_causal, one key head": (
        nnx_layer,
        Case(CROSS, any_mask, {"num_kv_heads": 1}, {"is_causal": True}),
    ),
    "linen: no mask, cross attention, normalised": (linen_layer, Case(CROSS, options={"normalize_qk": True})),
    "linen: float32 causal mask": (linen_layer, Case(self_attention(2), lambda: causal_mask(2))),
    "linen: bool mask, several batch axes": (
        linen_layer,
        Case(self_attention(2, 3), lambda: causal_mask(2, 3, dtype=bool)),
    ),
    "linen: cross attention, a mask per head": (linen_layer, Case(CROSS, any_mask)),
}


@cover(every=5)
@pytest.mark.parametrize(("make", "case"), CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_the_layers_own_attention(make: Callable[..., Layer], case: Case) -> None:
    own, parameters = make(case.inputs, **case.options)
    adapted, _ = make(case.inputs, attention_fn=attention_fn, **case.options)
    adapted, own = (functools.partial(apply, mask=case.mask(), **case.call) for apply in (adapted, own))
    assert_same_layer(adapted, own, own, parameters, case.inputs)


@cover(0)
@both_frameworks
@pytest.mark.parametrize("low", ["dtype", "param_dtype"])
def test_bfloat16(make: Callable[..., Layer], low: str) -> None:
    inputs = tuple(x.astype(jnp.bfloat16) for x in self_attention(2))
    own, parameters = make(inputs, **{low: jnp.bfloat16})
    adapted, _ = make(inputs, attention_fn=attention_fn, **{low: jnp.bfloat16})
    exact, _ = make(inputs)
    adapted, own, exact = (functools.partial(apply, mask=causal_mask(2)) for apply in (adapted, own, exact))
    assert jax.eval_shape(own, parameters, inputs).dtype == jnp.bfloat16
    assert_same_layer(adapted, own, exact, parameters, inputs)


@pytest.mark.parametrize("own", [nnx.dot_product_attention, linen.dot_product_attention], ids=FRAMEWORKS)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_unlike_dtypes_are_promoted_as_flax_does(own: Callable[..., jax.Array], dtype: Any) -> None:
    heads = [normal(seed, (2, LENGTH, HEADS, HEAD_DIM)) for seed in range(3)]
    heads = [array.astype(dtype) for array, dtype in zip(heads, (np.float32, jnp.bfloat16, np.float16), strict=True)]
    ours, theirs = (jax.eval_shape(functools.partial(f, dtype=dtype), *heads) for f in (attention_fn, own))
    assert ours == theirs


CAUSAL = np.tri(LENGTH, dtype=bool)
BAND = CAUSAL & ~np.tri(LENGTH, k=-4, dtype=bool)
SEGMENTS = np.repeat([[0, 1, 2]], [5, 1, 7], axis=1).repeat(2, axis=0)
BOUND = {
    "local_window_size": ({"local_window_size": (3, 0)}, BAND),
    "segment_ids": ({"segment_ids": SEGMENTS}, (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])[:, None]),
    "key_value_seq_lengths": ({"key_value_seq_lengths": np.array([9, 9])}, np.arange(LENGTH) < 9),
}


@cover(0)
@pytest.mark.parametrize(
    ("make", "options", "mask"),
    [
        *(
            pytest.param(make, *BOUND[option], id=f"{name}: {option}")
            for name, make in FRAMEWORKS.items()
            for option in BOUND
        ),
        pytest.param(linen_layer, {"is_causal": True}, CAUSAL, id="linen: is_causal"),
    ],
)
def test_a_bound_option_is_the_mask_it_stands_for(make: Callable[..., Layer], options: Any, mask: np.ndarray) -> None:
    inputs = self_attention(2)
    own, parameters = make(inputs)
    adapted, _ = make(inputs, attention_fn=functools.partial(attention_fn, **options))
    own = functools.partial(own, mask=jnp.broadcast_to(mask, (2, 1, LENGTH, LENGTH)))
    assert_same_output(adapted, own, parameters, inputs)


def test_every_argument_reaches_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {"dropout_rng": "dropout_key", "reproducible": "deterministic"}
    called = {}
    monkeypatch.setattr(
        jflash.flax, "attention", lambda *positional, **named: called.update(named, positional=positional)
    )
    array = jnp.ones((2, 3, HEADS, HEAD_DIM))
    flax_only = {"deterministic", "dtype", "module", "force_fp32_for_softmax"}
    flax_only |= {"qk_attn_weights_einsum", "attn_weights_value_einsum"}
    named = [p.name for p in inspect.signature(attention_fn).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = {name: object() for name in named if name not in flax_only} | {"dropout_rate": 0.5}
    bias = object()
    attention_fn(array, array, array, bias, **given)
    assert called.pop("positional")[3:] == (bias, None)
    assert called == {renamed.get(name, name): value for name, value in given.items()}
    positional = {"query", "key", "value", "bias", "mask", "return_residual"}
    # A layer projects its own keys and values; those of pages are a server's.
    of_pages = {"page_table", "k_scale", "v_scale"}
    assert set(called) == set(inspect.signature(jflash.attention).parameters) - positional - of_pages


@cover(0)
@both_frameworks
@pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
def test_what_a_mask_hides_has_no_influence(make: Callable[..., Layer], dtype: Any) -> None:
    """flax.linen drops, without a word, a mask that `attention_fn` does not name in its signature."""
    (inputs,) = self_attention(2)
    apply, parameters = make((inputs,), attention_fn=attention_fn)
    apply = functools.partial(apply, parameters, mask=causal_mask(2, dtype=dtype))
    changed = inputs + (np.arange(LENGTH) >= 7)[:, None]
    before, after = apply((inputs,)), apply((changed.astype(inputs.dtype),))
    assert jnp.array_equal(before[:, :7], after[:, :7])
    assert jnp.all(jnp.any(before[:, 7:] != after[:, 7:], axis=-1))


@cover(0)
@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_dropout_drops_at_the_rate(broadcast_dropout: bool) -> None:
    """Dropout drops for each head anew, or the same for all.

    With equal logits and the identity as values, the output is the probabilities themselves.
    """
    rate, length = 0.25, 64
    queries = jnp.zeros((2, length, HEADS, length))
    values = jnp.broadcast_to(jnp.eye(length)[:, None], (2, length, HEADS, length))
    draw = functools.partial(attention_fn, queries, queries, values, dropout_rate=rate)
    out = draw(dropout_rng=jax.random.key(0), broadcast_dropout=broadcast_dropout)
    kept = out > 0
    np.testing.assert_allclose(out[kept], 1 / (length * (1 - rate)), rtol=1e-6)
    if broadcast_dropout:
        np.testing.assert_array_equal(kept, jnp.broadcast_to(kept[:1, :, :1], kept.shape))
        kept = kept[:1, :, :1]
    five_sigma = 5 * np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < five_sigma
    if not broadcast_dropout:
        both = kept[:, :, :-1] & kept[:, :, 1:]
        both_rate = (1 - rate) ** 2
        assert abs(both.mean() - both_rate) < 5 * np.sqrt(both_rate * (1 - both_rate) / both.size)
    assert jnp.array_equal(draw(deterministic=True), attention_fn(queries, queries, values))


@cover(0)
@both_frameworks
def test_dropout_of_the_layers(make: Callable[..., Layer]) -> None:
    inputs = self_attention(2)
    apply, parameters = make(inputs, attention_fn=attention_fn, dropout_rate=0.25)
    draw = jax.jit(lambda key: apply(parameters, inputs, dropout=key, deterministic=False, mask=causal_mask(2)))
    plain, _ = make(inputs, attention_fn=attention_fn)
    expected = plain(parameters, inputs, mask=causal_mask(2))

    first, again, other = draw(jax.random.key(1)), draw(jax.random.key(1)), draw(jax.random.key(2))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
    assert jnp.array_equal(apply(parameters, inputs, deterministic=True, mask=causal_mask(2)), expected)

    draws = jax.vmap(draw)(jax.random.split(jax.random.key(3), 400))
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert jnp.all(jnp.abs(draws.mean(axis=0) - expected) < 5 * standard_error)


EINSUMS = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
REFUSALS = {
    "nnx: sow_weights": (nnx_layer, {}, {"sow_weights": True}, NotImplementedError, "`sow_weights=True`"),
    "linen: sow_weights": (linen_layer, {}, {"sow_weights": True}, NotImplementedError, "`sow_weights=True`"),
    "linen: einsum": (linen_layer, EINSUMS, {}, NotImplementedError, "`qk_attn_weights_einsum`"),
    "nnx: input_positions": (nnx_layer, {}, {"input_positions": jnp.arange(LENGTH)}, TypeError, "input_positions"),
}


@pytest.mark.parametrize(("make", "options", "call", "error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_honoured_is_refused(make: Any, options: Any, call: Any, error: Any, message: str) -> None:
    inputs = self_attention(2)
    _, parameters = make(inputs)
    with pytest.raises(error, match=message):
        make(inputs, attention_fn=attention_fn, **options)[0](parameters, inputs, **call)


def test_dropout_without_a_key_is_refused() -> None:
    array = jnp.ones((2, 3, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match=r"`dropout_rng`.*dropout_rate=0.1"):
        attention_fn(array, array, array, dropout_rate=0.1)


@cover(0)
def test_flax_is_imported_by_its_adapter_only_and_its_absence_explained() -> None:
    script = """
import sys
import jflash
assert not {"flax", "equinox"} & set(sys.modules)
sys.modules["flax"] = None  # as if it were not installed
import jflash.flax
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: jflash.flax needs Flax: pip install 'jflash[flax]'" in ran.stderr
