"""Hints: which legal calls warn or have a note, once each, and which have none."""

import functools
import logging
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash import _hints, _platform
from jflash._platform import Platform

HOPPER = Platform("gpu", "NVIDIA H100", "9.0", 132)


def qkv(query: tuple[int, ...], key: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, Any]:
    return dict(query=np.ones(query, dtype), key=np.ones(key, dtype), value=np.ones(key, dtype))


def same(*shape: int) -> dict[str, Any]:
    return qkv(shape, shape)


def shapes(*shape: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    return dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct(shape, dtype))


def additive(dtype: Any, hidden: float, tokens: int = 4) -> np.ndarray:
    return np.where(np.tri(tokens, dtype=bool), 0, hidden).astype(jnp.dtype(dtype))


DECODING = qkv((2, 1, 4, 8), (2, 6, 2, 8))
SELF = same(2, 4, 2, 8)
LONG = shapes(2, 2048, 2, 8)
PADDING = jax.ShapeDtypeStruct((2, 1, 1, 2048), bool)
HEADS_FIRST, NOT_SPLIT = same(2, 2, 129, 8), same(2, 6, 257)

IDS = np.arange(4096).reshape(2, 2048)
AS_OPTIONS: list[tuple[str, Callable[..., Any]]] = [
    ("segment_ids=ids", lambda b, h, q, k: jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k]),
    (
        "is_causal=True, segment_ids=ids",
        lambda b, h, q, k: (jnp.asarray(IDS)[0, k] == jnp.asarray(IDS)[0, q]) & (k <= q),
    ),
    (
        "local_window_size=(2048, 3), segment_ids=ids",
        lambda b, h, q, k: (jnp.asarray(IDS)[b, k] == jnp.asarray(IDS)[b, q]) & (k <= q + 3),
    ),
]
WARNINGS = [
    pytest.param(HEADS_FIRST, "swapaxes(x, -3, -2)", "T=2, S=2, N=129 and K=129", id="heads first"),
    pytest.param(
        qkv((2, 8, 129, 8), (2, 2, 129, 8)),
        "swapaxes(x, -3, -2)",
        "T=8, S=2, N=129 and K=129",
        id="grouped heads first",
    ),
    pytest.param(NOT_SPLIT, "x.reshape(B, T, N, H)", "T=2, N=6 and H=257", id="heads not split"),
    pytest.param({**DECODING, "is_causal": True}, "cache's length before this step", "T=1 and S=6", id="causal"),
    pytest.param({**DECODING, "local_window_size": (3, 0)}, "`query_offset` was not given", "T=1 and S=6", id="window"),
]
NOTES = [
    *(
        pytest.param({**SELF, "bias": additive(dtype, hidden)}, "mask=bias == 0", f"{dtype}[4, 4]", id=f"{hidden}")
        for dtype, hidden in (
            ("float32", -np.inf),
            ("float32", -1e9),
            ("float16", -1e4),
            ("bfloat16", np.finfo("f").min),
        )
    ),
    pytest.param(
        {**shapes(1, 300, 1, 8), "bias": additive("float32", -np.inf, 300)}, "is_causal=True", "[300, 300]", id="large"
    ),
    pytest.param({**LONG, "mask": PADDING}, "`key_value_seq_lengths`", "mask [2, 1, 1, 2048]", id="padding"),
    *(
        pytest.param(
            {**LONG, "mask_mod": function}, f"says what {options} says", "T=2048 and S=2048", id=f"mask_mod {n}"
        )
        for n, (options, function) in enumerate(AS_OPTIONS)
    ),
    pytest.param(
        {**LONG, "mask_mod": lambda b, h, q, k: k <= q, "query_offset": 3},
        "add it there",
        "both",
        id="offset, mask_mod",
    ),
]
RIGHT = {
    **{
        f"mask_mod {n}": {**LONG, "mask_mod": function}
        for n, function in enumerate(
            [
                lambda b, h, q, k: k <= q,
                lambda b, h, q, k: (k <= q) | (k < 5),
                lambda b, h, q, k: k + 1 <= q,
                lambda b, h, q, k: jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k + 1],
                lambda b, h, q, k: jnp.asarray(IDS)[h, q] == jnp.asarray(IDS)[h, k],
                lambda b, h, q, k: 2 * k <= q,
                lambda b, h, q, k: jnp.abs(q - k) > 3,
            ]
        )
    },
    "many heads, decoding": qkv((2, 1, 256, 8), (2, 6, 256, 8)),
    "many heads, one key head": qkv((2, 2, 256, 8), (2, 2, 1, 8)),
    "few tokens, 128 heads": same(2, 8, 128, 8),
    "more tokens than heads are grouped by": qkv((2, 3, 129, 8), (2, 2, 129, 8)),
    "many tokens and heads": same(1, 129, 130, 4),
    "time first": same(2, 300, 8),
    "no batch": same(8, 4, 256),
    "no batch, one wide head": same(8, 1, 512),
    "no batch, wide heads that share keys": qkv((8, 4, 576), (8, 1, 576)),
    "causal, one key": {**same(2, 1, 2, 8), "is_causal": True},
    "one query of a full cache": DECODING,
    "causal prefill of a longer cache": {**qkv((2, 2, 2, 8), (2, 6, 2, 8)), "is_causal": True},
    "offset 0 given": {**DECODING, "is_causal": True, "query_offset": 0},
    "offset": {**DECODING, "is_causal": True, "query_offset": 5},
    "offsets": {**DECODING, "is_causal": True, "query_offset": jnp.array([5, 2])},
    "window to both sides": {**DECODING, "local_window_size": 6},
    "bias": {**SELF, "bias": np.float32([[0, -1, -2e4, 3]])},
    "bias of zeros": {**SELF, "bias": np.zeros((4, 4), np.float32)},
    "bias in JAX, whose values are not read": {**SELF, "bias": jnp.asarray(additive("float32", -np.inf))},
    "empty bias": {**qkv((1, 2, 2, 8), (1, 0, 2, 8)), "bias": np.zeros((2, 0), np.float32)},
    "mask of pairs": {**LONG, "mask": jax.ShapeDtypeStruct((2, 1, 2048, 2048), bool)},
    "mask of heads": {**LONG, "mask": jax.ShapeDtypeStruct((2, 2, 1, 2048), bool)},
    "mask of padding, short": {**SELF, "mask": np.ones((2, 1, 1, 4), bool)},
    "mask beside lengths": {
        **LONG,
        "mask": PADDING,
        "key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
    },
    "mask beside segments": {**LONG, "mask": PADDING, "segment_ids": jax.ShapeDtypeStruct((2, 2048), jnp.int32)},
}


def test_what_a_mask_changes_for_rows_that_see_nothing() -> None:
    """Rows that see nothing come out 0 with a bias of -inf; with one of -1e9 they are the mean of the values."""
    said = {hidden: notes(**SELF, bias=additive("float32", hidden))[0] for hidden in (-np.inf, -1e9)}
    assert {hidden: "not the mean of the values" in note for hidden, note in said.items()} == {
        -np.inf: False,
        -1e9: True,
    }


def notes(**arguments: Any) -> list[str]:
    return [line for line in jflash.explain(**arguments).splitlines() if line.startswith("note: ")]


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hints, "_given", set())
    monkeypatch.setattr(_hints, "_replaced", type(_hints._replaced)())


@pytest.mark.parametrize(("arguments", "remedy", "got"), WARNINGS)
def test_warning(arguments: dict[str, Any], remedy: str, got: str) -> None:
    """A warning points at the call and has its numbers. It is said once, and by `explain` each time."""
    with pytest.warns(jflash.AttentionWarning) as caught:
        out = jflash.attention(**arguments)
    (warning,) = caught
    message = str(warning.message)
    assert remedy in message
    assert got in message.partition("Got ")[2]
    assert pathlib.Path(warning.filename) == pathlib.Path(__file__)
    again = jflash.attention(**arguments)  # Warnings are errors in these tests.
    np.testing.assert_array_equal(out, again)
    assert notes(**arguments) == notes(**arguments) == [f"note: {message}"]


@pytest.mark.parametrize(("arguments", "remedy", "got"), NOTES)
def test_note(arguments: dict[str, Any], remedy: str, got: str, caplog: pytest.LogCaptureFixture) -> None:
    """No warning: one record for who asks, and a line of `explain`."""
    (note,) = notes(**arguments)
    assert remedy in note
    assert got in note.partition("Got ")[2]
    is_shape = lambda value: isinstance(value, jax.ShapeDtypeStruct)
    traced = {name: value for name, value in arguments.items() if is_shape(value)}
    concrete = {name: value for name, value in arguments.items() if not is_shape(value)}
    trace = lambda: jax.eval_shape(lambda traced: jflash.attention(**traced, **concrete), traced)
    trace()
    with caplog.at_level(logging.INFO, "jflash"):
        trace()
        trace()
    assert [record.getMessage() for record in caplog.records] == [note.removeprefix("note: ")]
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("arguments", RIGHT.values(), ids=RIGHT.keys())
def test_nothing_is_said_of_a_right_call(arguments: dict[str, Any]) -> None:
    assert notes(**arguments) == []


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint, lambda f: jax.jit(jax.vmap(jax.grad(f)))]
)
def test_under_transforms(transform: Callable[..., Any]) -> None:
    """A warning comes where the function is traced, of what one entry of `vmap` looks like, and not when it runs."""

    def decode(query: jax.Array) -> jax.Array:
        return jflash.attention(query, DECODING["key"], DECODING["value"], is_causal=True).sum()

    query = DECODING["query"]
    function = transform(decode)
    if transform not in (jax.jit, jax.grad, jax.checkpoint):
        query = query[None]
    with pytest.warns(jflash.AttentionWarning, match="T=1 and S=6") as caught:
        function(query)
    assert [pathlib.Path(warning.filename) for warning in caught] == [pathlib.Path(__file__)]
    function(query)


def test_parts_of_sequences() -> None:
    """A device's part of a sequence may look like a step of decoding, or like heads first."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    part = jax.sharding.PartitionSpec(None, "x")
    for arguments in (qkv((2, 4, 4, 8), (2, 8, 4, 8)), same(2, 8, 129, 8)):
        attend = functools.partial(jflash.attention, is_causal=True, sequence_axis="x")
        jax.eval_shape(
            jax.shard_map(attend, mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=False),
            *arguments.values(),
        )


def test_traced_offset() -> None:
    step = jax.jit(lambda at: jflash.attention(**DECODING, is_causal=True, query_offset=at))
    step(3)


def test_a_warning_that_is_an_error_is_raised_each_time() -> None:
    """A warning that was raised was not said; one that a filter ignores was."""
    for _ in range(2):
        with pytest.raises(jflash.AttentionWarning):
            jflash.attention(**DECODING, is_causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jflash.AttentionWarning)
        jflash.attention(**DECODING, is_causal=True)
    jflash.attention(**DECODING, is_causal=True)


def test_nothing_is_computed_for_a_hint() -> None:
    """The program of a suspicious call is that of the same call when it was said."""
    program = lambda: str(jax.make_jaxpr(functools.partial(jflash.attention, is_causal=True))(*DECODING.values()))
    with pytest.warns(jflash.AttentionWarning):
        first = program()
    assert program() == first


def twice(logit: Any, *_: Any) -> Any:
    return 2 * logit


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad], ids=["call", "grad"])
def test_new_score_mod_at_each_step(transform: Callable[..., Any]) -> None:
    total = lambda query, score_mod: jflash.attention(query, SELF["key"], SELF["value"], score_mod=score_mod).sum()
    step = transform(total)

    def steps(times: int) -> None:
        for _ in range(times):
            step(SELF["query"], lambda logit, *_: 2 * logit)

    steps(3)
    with pytest.warns(jflash.AttentionWarning, match="Define it once.* Got .*<lambda> of line .*, 4 times") as caught:
        steps(4)
    assert len(caught) == 1


def test_lasting_score_mods() -> None:
    """One function, a layer's own that differs from its neighbour's, and a new one that is compiled in a program."""
    make = lambda: lambda logit, *_: 2 * logit
    layers = [make() for _ in range(5)]
    for _ in range(2):
        for score_mod in (twice, *layers):
            jflash.attention(**SELF, score_mod=score_mod)
    for seed in range(6):
        jax.jit(lambda seed: jflash.attention(**SELF, score_mod=lambda logit, *_: 2 * logit) + seed)(seed)
    objects = [functools.partial(twice) for _ in range(2)]
    for score_mod in objects:
        jflash.attention(**SELF, score_mod=score_mod)


def test_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said where 16 bits would be served by another implementation, and only there."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda arrays: {"cuda": HOPPER})
    (note,) = notes(**shapes(1, 128, 2, 320))
    assert "xla serves float32 here, and mosaic_gpu would serve bfloat16" in note
    assert note.endswith("Got dtype float32.")
    assert notes(**shapes(1, 128, 2, 320, dtype=jnp.bfloat16)) == []
    assert notes(**shapes(1, 128, 2, 256)) == []  # heads with which float32 has the kernels too
    assert notes(**shapes(1, 128, 2, 584)) == []  # heads that are too wide in any dtype
    assert notes(**shapes(1, 128, 2, 320), implementation="xla") == []
    assert notes(**shapes(1, 128, 2, 320), implementation="mosaic_gpu") == []
    monkeypatch.undo()
    assert notes(**shapes(1, 128, 2, 320)) == []
