"""`jflash.replacing_jax_nn`: what jax.nn.dot_product_attention gives, and which calls jflash served."""

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from layers import compiled, normal
from oracle import Call, assert_within, exact, tolerances
from short_run import cover

import jflash
import jflash.flax
from jflash import _replacing

BATCH, LENGTH, KEY_LENGTH, HEADS, HEAD_DIM = 2, 13, 17, 4, 8
ORIGINAL = jax.nn.dot_product_attention
by_attribute = lambda *args, **options: jax.nn.dot_product_attention(*args, **options)


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    assert jax.nn.dot_product_attention is ORIGINAL


def operands(key_heads: int = HEADS, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    shapes = dict(query=(LENGTH, HEADS), key=(KEY_LENGTH, key_heads), value=(KEY_LENGTH, key_heads))
    return {
        name: normal(seed, (BATCH, *shape, HEAD_DIM)).astype(dtype) for seed, (name, shape) in enumerate(shapes.items())
    }


ANY_MASK = (normal(4, (BATCH, HEADS, LENGTH, KEY_LENGTH)) > 0) | (np.arange(KEY_LENGTH) == 0)
BIAS = normal(5, (1, HEADS, LENGTH, KEY_LENGTH))
LENGTHS = np.array([9, 13], np.int32)
PLAIN = jnp.ones((2, 5, 2, 4))

CASES: dict[str, dict[str, Any]] = {
    "no option": {},
    "mask and bias": {"mask": ANY_MASK, "bias": BIAS},
    "causal, scale, grouped heads": {"is_causal": True, "scale": 0.5, **operands(2)},
    "window, traced scale": {"local_window_size": (3, 1), "scale": np.full((), 0.3, np.float32)},
    "one number for the window, key lengths": {"local_window_size": 4, "key_value_seq_lengths": LENGTHS},
    "query and key lengths, causal": {
        "query_seq_lengths": LENGTHS - 2,
        "key_value_seq_lengths": LENGTHS,
        "is_causal": True,
    },
    "lengths out of range, one key head": {"key_value_seq_lengths": LENGTHS + 10, **operands(1)},
    "bfloat16, causal": {"is_causal": True, **operands(2, jnp.bfloat16)},
    "xla by name": {"implementation": "xla", "mask": ANY_MASK},
}


@cover(every=9)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values_and_gradients_are_those_of_jax_nn(options: dict[str, Any]) -> None:
    """Against float64, as near as plain attention; and in everything but roundings as jax.nn."""
    options = {**operands(), **options}
    smooth = {name: jnp.asarray(options.pop(name)) for name in ("query", "key", "value", "bias") if name in options}
    if isinstance(options.get("scale"), np.ndarray):
        smooth["scale"] = jnp.asarray(options.pop("scale"))
    d_out = normal(99, smooth["query"].shape).astype(smooth["query"].dtype)

    def run() -> tuple[Any, Any, Any]:
        @compiled
        def forward_and_backward(smooth: Any) -> tuple[Any, Any, Any]:
            call = lambda smooth: by_attribute(**smooth, **options, return_residual=True)
            (out, lse), pull_back = jax.vjp(call, smooth)
            (gradients,) = pull_back((d_out, jnp.ones_like(lse)))
            return out, lse, gradients

        return forward_and_backward(smooth)

    theirs = run()
    with jflash.replacing_jax_nn() as replaced:
        ours = run()
    assert (replaced.served, replaced.left) == (1, [])
    same_kind = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)
    assert jax.tree.all(jax.tree.map(same_kind, ours, theirs))

    lengths = {
        n: np.clip(options[n], 0, m)
        for n, m in dict(query_seq_lengths=13, key_value_seq_lengths=17).items()
        if n in options
    }
    arrays = {name: np.asarray(array) for name, array in smooth.items()}
    options = {name: option for name, option in options.items() if name != "implementation"}
    call = Call(**arrays, **{**options, **lengths}, d_out=d_out, d_lse=np.zeros(theirs[1].shape, np.float32))
    truth, allowed = exact(call), tolerances(call)
    gradients = lambda results: {name: results.gradients[name] for name in smooth}
    assert_within((ours[0], ours[2]), (truth.out, gradients(truth)), (allowed.out, gradients(allowed)))
    seen = np.isfinite(truth.lse)
    rounding = float(jnp.finfo(theirs[1].dtype).eps) * np.max(np.abs(truth.lse[seen]))
    assert_within(ours[1][seen], truth.lse[seen], allowed.lse + rounding)
    assert np.all(np.asarray(ours[1])[~seen] == -np.inf)


def test_no_gradient_comes_from_the_log_sum_exp() -> None:
    with jflash.replacing_jax_nn():
        gradient = jax.grad(lambda q: by_attribute(q, q, q, return_residual=True)[1].sum())(PLAIN)
    assert not gradient.any()


@pytest.mark.parametrize("shape", [(5, 2, 4), (2, 4), (1, 5, 2, 4)])
def test_missing_axes(shape: tuple[int, ...]) -> None:
    query = normal(0, shape)
    bias = normal(1, (2, 1, 1))
    run = lambda: by_attribute(query, query[-1:], query[-1:], bias, return_residual=True)
    theirs = run()
    with jflash.replacing_jax_nn() as replaced:
        ours = run()
    assert replaced.served == 1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs)


def test_what_jax_nn_takes_for_an_array_or_a_number() -> None:
    """Lists, a bias of integers, True for 1."""
    query = normal(0, (1, 3, 1, 2)).tolist()
    options: dict[str, Any] = {"scale": True, "local_window_size": (True, 5)}
    run = lambda: by_attribute(query, query, query, np.eye(3, dtype=np.int32)[None, None], **options)
    theirs = run()
    with jflash.replacing_jax_nn() as replaced:
        ours = run()
    assert replaced.served == 1
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (dict.fromkeys(("query", "key", "value"), jnp.ones((2, 5, 2, 4), jnp.int32)), "int32"),
    "scale": ({"scale": jnp.ones((5, 1))}, "`scale`"),
    "infinite scale": ({"scale": np.inf}, "`scale`"),
    "negative window": ({"local_window_size": (-1, 3)}, "`local_window_size`"),
    "traced window": ({"local_window_size": (jnp.array(1), jnp.array(2))}, "`local_window_size`"),
    "more keys in the mask": (
        {"key": PLAIN[:, :1], "value": PLAIN[:, :1], "mask": np.ones((1, 1, 5, 3), bool)},
        "keys",
    ),
}


@pytest.mark.parametrize(("options", "reason"), LEFT.values(), ids=LEFT)
def test_what_jflash_does_not_take_is_left_with_a_reason(options: dict[str, Any], reason: str) -> None:
    call = {"query": PLAIN, "key": PLAIN, "value": PLAIN, **options}
    theirs = ORIGINAL(**call)
    with jflash.replacing_jax_nn() as replaced:
        ours = [by_attribute(**call) for _ in range(2)]
    np.testing.assert_array_equal(ours[0], theirs)
    assert replaced.served == 0
    (left,) = replaced.left
    assert left.times == 2
    assert reason in left.reason
    assert left.call.startswith("query ")


def test_cudnn_by_name_and_unknown_arguments_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.nn has an argument more here, as it may have some day."""

    def newer(query: Any, key: Any, value: Any, *, implementation: Any = None, mask_value: Any = None) -> Any:
        return ORIGINAL(query, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", newer)
        with jflash.replacing_jax_nn() as replaced:
            by_attribute(PLAIN, PLAIN, PLAIN, implementation="cudnn")
            by_attribute(PLAIN, PLAIN, PLAIN, mask_value=-1e9)
            by_attribute(PLAIN, PLAIN, PLAIN, mask_value=None)
        assert jax.nn.dot_product_attention is newer
    assert replaced.served == 1
    words = "query float32[2, 5, 2, 4], key float32[2, 5, 2, 4], value float32[2, 5, 2, 4]"
    named = "`implementation` names cuDNN, and `replacing_jax_nn` was not called with cudnn=True"
    assert replaced.left == [
        (f"{words}, implementation='cudnn'", named, 1),
        (f"{words}, mask_value=-1000000000.0", "jflash does not know the argument `mask_value`", 1),
    ]
    assert str(replaced).startswith(
        "jflash served 1 call of jax.nn.dot_product_attention and left 2.\n"
        f"  1 call left, because {named}: {words}, implementation='cudnn'.\n"
        f"  1 call left, because jflash does not know the argument `mask_value`: {words}, mask_value=-1000000000.0.\n"
    )


def test_cudnn_by_name_is_served_if_asked() -> None:
    """In the innermost block that asks; jax.nn itself would need a cuDNN."""
    want = ORIGINAL(PLAIN, PLAIN, PLAIN, is_causal=True)
    with jflash.replacing_jax_nn() as outer, jflash.replacing_jax_nn(cudnn=True) as replaced:
        got = by_attribute(PLAIN, PLAIN, PLAIN, is_causal=True, implementation="cudnn")
        by_attribute(PLAIN, PLAIN, PLAIN)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert (replaced.served, replaced.left) == (2, [])
    assert (outer.served, outer.left) == (0, [])
    with pytest.raises(TypeError, match="`cudnn`"):
        jflash.replacing_jax_nn(cudnn="yes")  # pyright: ignore[reportArgumentType]


def test_symbolic_sizes_are_left() -> None:
    (size,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((size, 5, 2, 4), np.float32)
    with jflash.replacing_jax_nn() as replaced:
        exported = jax.export.export(jax.jit(lambda q: by_attribute(q, q, q)))(shape)
    assert exported.call(PLAIN).shape == PLAIN.shape
    assert "symbolic" in replaced.left[0].reason


WRONG: dict[str, dict[str, Any]] = {
    "no query": {"query": None},
    "no value": {"value": None},
    "ranks": {"query": jnp.ones((1, 2, 5, 2, 4))},
    "dtypes": {"value": PLAIN.astype(jnp.bfloat16)},
    "head dimensions of the values": {"value": jnp.ones((2, 5, 2, 6))},
    "heads": {"query": jnp.ones((2, 5, 3, 4))},
    "a float mask": {"mask": jnp.ones((1, 1, 5, 5))},
    "a mask that does not fit": {"mask": jnp.ones((1, 1, 4, 5), bool)},
    "64-bit lengths": {"query_seq_lengths": jnp.ones(2, jnp.int16)},
    "implementation": {"implementation": "none such"},
    "an unknown argument": {"none_such": 1},
    "a window of three": {"local_window_size": (1, 2, 3)},
    "a window of words": {"local_window_size": "wide"},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_what_is_wrong_raises_what_jax_nn_raises(options: dict[str, Any]) -> None:
    call = {"query": PLAIN, "key": PLAIN, "value": PLAIN, **options}
    with pytest.raises((TypeError, ValueError, AssertionError)) as theirs:
        ORIGINAL(**call)
    with jflash.replacing_jax_nn() as replaced, pytest.raises(theirs.type):
        by_attribute(**call)
    assert (replaced.served, replaced.left) == (0, [])


def test_traced_options_raise_as_in_jax_nn() -> None:
    with jflash.replacing_jax_nn(), pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda causal: by_attribute(PLAIN, PLAIN, PLAIN, is_causal=causal))(True)


def test_it_is_restored_after_an_exception_and_between_nested_blocks() -> None:
    outer, inner = jflash.replacing_jax_nn(), jflash.replacing_jax_nn()
    with outer:
        by_attribute(PLAIN, PLAIN, PLAIN)
        with contextlib.suppress(KeyError), inner:
            by_attribute(PLAIN, PLAIN, PLAIN)
            by_attribute(PLAIN, PLAIN, PLAIN)
            raise KeyError
        by_attribute(PLAIN, PLAIN, PLAIN)
        assert jax.nn.dot_product_attention is not ORIGINAL
        with outer:
            by_attribute(PLAIN, PLAIN, PLAIN)
    assert jax.nn.dot_product_attention is ORIGINAL
    assert (outer.served, inner.served) == (3, 2)


def test_blocks_of_threads_may_end_in_any_order() -> None:
    first, second = jflash.replacing_jax_nn(), jflash.replacing_jax_nn()
    entered, leave = threading.Event(), threading.Event()

    def longer() -> None:
        with second:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=longer)
    with first:
        thread.start()
        assert entered.wait(60)
        by_attribute(PLAIN, PLAIN, PLAIN)
    assert jax.nn.dot_product_attention is not ORIGINAL
    leave.set()
    thread.join()
    assert (first.served, second.served) == (0, 1)


def test_a_decorated_function() -> None:
    replacing = jflash.replacing_jax_nn()

    @replacing
    def attend(depth: int) -> jax.Array:
        """Call itself, twice."""
        return attend(depth - 1) if depth else by_attribute(PLAIN, PLAIN, PLAIN)

    assert attend.__doc__ == "Call itself, twice."
    assert replacing.report().startswith("No call")
    for remedy in ("einsums", "attention_fn=jflash.flax.attention_fn", "jax.clear_caches()"):
        assert remedy in replacing.report()
    attend(1)
    attend(0)
    first, last = replacing.report().splitlines()
    assert first == "jflash served 2 calls of jax.nn.dot_product_attention and left none."
    assert "imported the function by name" in last


def test_functions_that_run_after_their_call_are_not_decorated() -> None:
    def generator() -> Any:
        yield

    async def coroutine() -> None:
        await asyncio.sleep(0)

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=function.__name__):
            jflash.replacing_jax_nn()(function)


def test_what_is_traced_in_the_block_keeps_jflash_and_what_was_before_keeps_jax_nn() -> None:
    attend: Callable[[], Any] = lambda: jax.jit(lambda q: by_attribute(q, q, q))
    before, inside = attend(), attend()
    before(PLAIN)
    with jflash.replacing_jax_nn() as replaced:
        before(PLAIN)
        inside(PLAIN)
        inside(PLAIN)
        kept = jax.nn.dot_product_attention
    inside(PLAIN)
    assert replaced.served == 1
    assert "jflash" in str(jax.make_jaxpr(inside)(PLAIN))
    assert "jflash" not in str(jax.make_jaxpr(before)(PLAIN))
    kept(PLAIN, PLAIN, PLAIN)
    assert replaced.served == 1


def test_the_signature_is_that_of_jax_nn() -> None:
    with jflash.replacing_jax_nn():
        assert inspect.signature(jax.nn.dot_product_attention) == inspect.signature(ORIGINAL)
    known = set(inspect.signature(ORIGINAL).parameters)
    assert known <= set(_replacing._KNOWN), "jax.nn has an argument that jflash does not know yet"


@cover(0)
def test_a_layer_of_flax_is_served() -> None:
    """Flax's own attention function calls jax.nn's where no dropout is drawn."""
    layer = nnx.MultiHeadAttention(HEADS, 16, 16, decode=False, rngs=nnx.Rngs(0))
    inputs = normal(0, (BATCH, LENGTH, 16))
    mask = nnx.make_causal_mask(inputs[..., 0], dtype=bool)
    loss = lambda inputs: (layer(inputs, mask=mask) ** 2).sum()
    theirs = jax.value_and_grad(loss)(inputs)
    with jflash.replacing_jax_nn() as replaced:
        ours = jax.value_and_grad(loss)(inputs)
    assert (replaced.served, replaced.left) == (1, [])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("layer", ["linen", "nnx with dropout"])
def test_layers_of_flax_that_make_no_call(layer: str) -> None:
    """The report says with what they do use jflash, and that is so."""
    inputs = normal(0, (1, 5, 16))

    def run(**options: Any) -> Any:
        if layer == "linen":
            return linen.MultiHeadDotProductAttention(HEADS, **options).init_with_output(jax.random.key(0), inputs)[0]
        rngs = nnx.Rngs(0)
        return nnx.MultiHeadAttention(HEADS, 16, 16, dropout_rate=0.5, decode=False, rngs=rngs, **options)(
            inputs, deterministic=False
        )

    with jflash.replacing_jax_nn() as replaced:
        run()
    assert (replaced.served, replaced.left) == (0, [])
    assert "flax.linen" in replaced.report()
    assert "flax.nnx with dropout" in replaced.report()
    traced = jax.make_jaxpr(lambda: run(attention_fn=jflash.flax.attention_fn))()
    assert "jflash" in str(traced)


def test_a_jit_of_the_models_own_keeps_what_it_traced() -> None:
    """As that of DeepMind's gemma does, until its caches are cleared."""

    class Model(linen.Module):
        @linen.jit
        @linen.compact
        def __call__(self, query: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(query, query, query)

    model = Model()
    model.apply({}, PLAIN)
    with jflash.replacing_jax_nn() as replaced:
        model.apply({}, PLAIN)
        assert replaced.served == 0
        assert "flax.linen.jit" in replaced.report()
        jax.clear_caches()
        model.apply({}, PLAIN)
    assert replaced.served == 1
