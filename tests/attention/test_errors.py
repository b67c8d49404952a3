"""Everything that a person or a refactoring can get wrong, as one table: what is raised, and what it must say."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong_calls import (
    ARRAY,
    FLOATING,
    GOOD,
    INTEGERS,
    NUMBERS,
    B,
    D,
    H,
    K,
    N,
    S,
    T,
    assert_own,
    assert_refused,
    ints,
    nothing_runs,
    rows,
    zeros,
)

import jflash
from jflash import _dispatch

KEY = jax.random.key(0)
SHAPES = {name: array.shape for name, array in GOOD.items()}
DTYPES = "one of the dtypes float32, bfloat16, float16, float64"

TABLE = [
    row
    for name, shape in SHAPES.items()
    for row in [
        *rows(name, TypeError, ARRAY, {"NoneType": None, "list": np.zeros(shape).tolist(), "float": 1.0}),
        *rows(name, TypeError, NUMBERS, {"object": np.full(shape, None), "<U1": np.full(shape, "x")}),
        *rows(name, TypeError, NUMBERS, {"datetime64": np.zeros(shape, "M8[s]"), "key": jnp.broadcast_to(KEY, shape)}),
        *rows(name, TypeError, DTYPES, {"int32": ints(*shape), "bool": zeros(*shape, dtype=bool)}),
        *rows(name, TypeError, DTYPES, {"complex128": zeros(*shape, dtype=complex)}),
        *rows(name, TypeError, DTYPES, {"float8_e4m3fn": jnp.zeros(shape, jnp.float8_e4m3fn)}),
        *rows(name, ValueError, "at least the axes", {"shape ()": np.float32(0), "shape (4, 8)": zeros(4, 8)}),
        *rows(name, ValueError, "at least one head and one feature", {"0, 8)": zeros(*shape[:2], 0, 8)}),
        *rows(name, ValueError, "at least one head and one feature", {", 0)": zeros(*shape[:3], 0)}),
    ]
]
TABLE += [
    *rows("query", TypeError, "the same dtype", {"float16, float32 and": zeros(B, T, N, H, dtype=np.float16)}),
    *rows("value", TypeError, "the same dtype", {"and bfloat16": jnp.zeros((B, S, K, D), jnp.bfloat16)}),
    *rows("query", ValueError, "the same batch axes", {"(3,), (2,) and (2,)": zeros(3, T, N, H)}),
    *rows("key", ValueError, "the same batch axes", {"(2,), (1, 2) and (2,)": zeros(1, B, S, K, H)}),
    *rows("value", ValueError, "the same batch axes", {"(2,), (2,) and ()": zeros(S, K, D)}),
    *rows("query", ValueError, "the same head dimension", {"H=9 and H=8": zeros(B, T, N, 9)}),
    *rows("value", ValueError, "the same length and heads", {"[6, 2]": zeros(B, 6, K, D), "[5, 1]": zeros(B, S, 1, D)}),
    *rows("query", ValueError, "a multiple of `key`", {"N=3 and K=2": zeros(B, T, 3, H), "N=1 and": zeros(B, T, 1, H)}),
    # Heads before lengths, as other libraries have them.
    *rows("key", ValueError, "a multiple of", {"N=4 and K=5": zeros(B, K, S, H)}, value=zeros(B, K, S, D)),
    *rows(
        "query",
        ValueError,
        "if heads come first, give jnp.swapaxes(x, -3, -2)",
        {f"N={T} and K={S}": zeros(B, N, T, H)},
        key=zeros(B, K, S, H),
        value=zeros(B, K, S, D),
    ),
    *rows("query", ValueError, "a single head is x[:, None, :]", {f"({T}, {H})": zeros(T, H)}),
    *rows("sequence_axis", TypeError, "the name of a mesh axis", {"3": 3, "['x', 4]": ["x", 4]}),
    *rows("sequence_axis", ValueError, "of the jax.shard_map around", {"'x', and the axes here are ()": "x"}),
    *rows("sequence_strategy", ValueError, "one of ring, all_to_all, gather", {"'tree'": "tree"}),
    *rows("bias mask alibi_slopes sinks", TypeError, ARRAY, {"list": [1.0], "float": 1.0}),
    *rows("bias", TypeError, "bool array of who may attend is `mask`", {"dtype bool": zeros(T, S, dtype=bool)}),
    *rows("bias", TypeError, FLOATING, {"int32": ints(T, S), "complex64": zeros(T, S, dtype=np.complex64)}),
    *rows("mask", TypeError, "0 and -inf mask == 0; what is added to logits is `bias`", {"float32": zeros(T, S)}),
    *rows(
        "mask",
        TypeError,
        "give mask != 0",
        {"float32": zeros(T, S), "int32": ints(T, S), "uint8": ints(T, S).astype(np.uint8)},
    ),
    *(
        row
        for name, dtype in (("bias", np.float32), ("mask", bool))
        for shape in ((S, T), (0,), (B, S), (B, K, T, S), (3, N, T, S), (1, B, N, T, S))
        for row in rows(name, ValueError, "broadcastable to [*B, N, T, S]", {str(shape): zeros(*shape, dtype=dtype)})
    ),
    *rows("bias", ValueError, "If its axes are [B, T, S], give bias[:, None].", {"": zeros(B, T, S)}),
    *rows("mask", ValueError, "If its axes are [B, S], give mask[:, None, None].", {"": zeros(B, S, dtype=bool)}),
    *rows("alibi_slopes sinks", TypeError, FLOATING, {"int32": ints(N), "complex64": zeros(N, dtype=np.complex64)}),
    *rows(
        "alibi_slopes sinks",
        ValueError,
        "one value for each query head, shape (4,)",
        {"(2,)": zeros(K), "(1, 4)": zeros(1, N), "()": np.float32(0)},
    ),
]
TABLE += [
    *rows("scale", TypeError, "a number or a scalar array", {"'1'": "1", "[1.0]": [1.0], "True": True, "1j": 1j}),
    *rows("scale", TypeError, FLOATING, {"complex64": jnp.complex64(1), "int32": jnp.int32(1)}),
    *rows("scale", ValueError, "finite", {"nan": np.array(np.nan), "inf": float("inf")}),
    *rows("scale", ValueError, "within the range of a float", {"an integer beyond": 10**400}),
    *rows("scale", ValueError, "one number", {"shape (4,)": zeros(N)}),
    *rows("logits_soft_cap", TypeError, "a positive number", {"'x'": "x", "True": True, "float32[]": jnp.float32(3)}),
    *rows("logits_soft_cap", ValueError, "positive and finite", {"0": 0, "-1.0": -1.0, "nan": np.nan, "inf": np.inf}),
    *rows(
        "is_causal deterministic return_residual",
        TypeError,
        "a bool",
        {"None": None, "1": 1, "'yes'": "yes", "an array bool[]": jnp.array(True)},
    ),
    *rows("precision", ValueError, "a jax.lax.Precision or its name", {"3": 3, "'nope'": "nope", "'HIGH'": "HIGH"}),
    *rows("precision", ValueError, "a pair", {"('high',)": ("high",), "('high', 'x')": ("high", "x")}),
    *rows(
        "precision", ValueError, "a pair", {"('F32_F32_F32', ": ("F32_F32_F32",) * 2, "[None, None, None]": [None] * 3}
    ),
    *rows(
        "local_window_size",
        TypeError,
        "an integer or a pair",
        {"1.5": 1.5, "2.5": (1, 2.5), "None": (None, 2), "True": True},
    ),
    *rows(
        "local_window_size",
        TypeError,
        "static_argnames",
        {"int32[]": jnp.int32(3), "an array int32[]": (0, jnp.int32(3))},
    ),
    *rows("local_window_size", ValueError, "an integer or a pair", {"(1, 2, 3)": (1, 2, 3), "[]": []}),
    *rows("local_window_size", ValueError, "give the number of keys for no limit", {"-1": -1, "(0, -2)": (0, -2)}),
    *rows(
        "query_offset",
        TypeError,
        "an integer or an integer array",
        {"1.5": 1.5, "'0'": "0", "True": True, "[0]": [0]},
    ),
    *rows("query_offset", TypeError, INTEGERS, {"float32": zeros(B)}),
    *rows("query_offset", ValueError, "that of the batch, (2,)", {"(3,)": ints(3), "(1, 2)": ints(1, B)}),
    *rows(
        "query_offset",
        ValueError,
        "between -2**29 and 2**29",
        {str(2**40): 2**40, "-4294967296": np.array([0, -(2**32)])},
    ),
    *rows("segment_ids", TypeError, ARRAY, {"int": 3, "NoneType": (ints(B, T), None)}),
    *rows("segment_ids", TypeError, INTEGERS, {"float32": (zeros(B, T), ints(B, S)), "bool": zeros(B, T, dtype=bool)}),
    *rows(
        "segment_ids",
        ValueError,
        "a pair (query's, key's)",
        {"3 of them": (ints(B, T),) * 3, "1 of them": [ints(B, T)]},
    ),
    *rows("segment_ids", ValueError, "of the key must have the shape (2, 5)", {"(2, 4)": ints(B, T)}),
    *rows("segment_ids", ValueError, "of the query must have the shape (2, 4)", {"(4,)": (ints(T), ints(S))}),
    *rows("segment_ids", ValueError, "2**31", {"1099511627776": (np.full((B, T), 2**40), ints(B, S))}),
]
for name, axis, most in (("query_seq_lengths", "T", T), ("key_value_seq_lengths", "S", S)):
    TABLE += [
        *rows(name, TypeError, "jnp.full((2,), length) has the same for all", {"[1, 2]": [1, 2], "3": 3}),
        *rows(name, TypeError, INTEGERS, {"float32": zeros(B), "bool": zeros(B, dtype=bool)}),
        *rows(name, TypeError, NUMBERS, {"object": np.full(B, None)}),
        *rows(
            name,
            ValueError,
            "the shape (2,), one length for each batch entry",
            {"()": np.int32(3), "(3,)": jnp.zeros(3, int), "(2, 1)": ints(B, 1)},
        ),
        *rows(name, ValueError, f"between 0 and {axis}={most}", {"-1 to 2": np.array([-1, 2])}),
        *rows(name, ValueError, f"between 0 and {axis}={most}", {f"0 to {most + 1}": np.array([0, most + 1])}),
    ]
TABLE += [
    *rows(
        "dropout_rate",
        TypeError,
        "a number",
        {"None": None, "True": True, "float32[]": jnp.float32(0.5)},
        dropout_key=KEY,
    ),
    *rows(
        "dropout_rate", ValueError, "at least 0 and below 1", {"-0.1": -0.1, "1.0": 1.0, "nan": np.nan}, dropout_key=KEY
    ),
    *rows(
        "dropout_rate", ValueError, "`dropout_key` is needed when `dropout_rate` is above 0", {"dropout_rate=0.5": 0.5}
    ),
    *rows("dropout_key", TypeError, "a JAX random key", {"3": 3, "an array int32[2]": ints(2)}),
    *rows(
        "dropout_key",
        ValueError,
        "one key",
        {"(2,)": jax.random.split(KEY), "(3,)": zeros(3, dtype=np.uint32), "(2, 2)": zeros(2, 2, dtype=np.uint32)},
        dropout_rate=0.5,
    ),
    *rows(
        "implementation",
        ValueError,
        f"some of {', '.join(_dispatch.BACKENDS)}; leave it out",
        {repr(value): value for value in ("nope", "Reference", "", ["xla", "nope"], [], ())},
    ),
    *rows(
        "implementation",
        TypeError,
        "a name, a sequence of names or None",
        {repr(value): value for value in (3, [3], {"xla"}, b"xla")},
    ),
]


@pytest.mark.parametrize(("error", "name", "rule", "got", "arguments"), TABLE)
def test_wrong_argument(error: type[Exception], name: str, rule: str, got: str, arguments: dict[str, Any]) -> None:
    assert_refused(error, name, rule, got, arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("is_causal", "deterministic", "return_residual")),
        *(("local_window_size", 3), ("local_window_size", (3, 0)), ("logits_soft_cap", 2.0), ("dropout_rate", 0.5)),
    ],
)
def test_traced_where_it_must_be_known(name: str, value: Any) -> None:
    for function in (jflash.attention, jflash.explain):
        refused = pytest.raises(TypeError, match=f"`{name}` must be known when the call is traced.*Got a traced")
        with nothing_runs(), refused as caught:
            jax.jit(lambda value, function=function: function(**GOOD, dropout_key=KEY, **{name: value}))(value)
        assert type(caught.value) is TypeError
        assert_own(caught)


@pytest.mark.parametrize(
    "wrong", [dict(is_causal=1), dict(precision="nope"), dict(sinks=ints(N))], ids=lambda w: next(iter(w))
)
def test_nothing_is_compiled_before_the_error(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The error comes first even where much else, that is right, would have to be prepared."""
    right = dict(
        bias=jnp.zeros((T, S), jnp.bfloat16),
        mask=jnp.ones((1, N, 1, S), bool),
        alibi_slopes=jnp.zeros(N, jnp.bfloat16),
        sinks=jnp.zeros(N, jnp.bfloat16),
        key_value_seq_lengths=jnp.full(B, S),
        query_offset=jnp.int32(3),
        segment_ids=(jnp.zeros((B, T), int), jnp.zeros((B, S), int)),
        dropout_rate=0.5,
        dropout_key=jax.random.key(7),
        score_mod=lambda logit, *_: logit + jnp.float32(1),
    )
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises((TypeError, ValueError)):
        jflash.attention(**GOOD, **{**right, **wrong})
    assert [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()] == []


@pytest.mark.parametrize("function", [jflash.attention, jflash.explain], ids=lambda function: function.__name__)
def test_unknown_argument(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'dropout'"):
        function(**GOOD, dropout=0.5)
