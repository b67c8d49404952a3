"""Everything that a person or a refactoring can get wrong, as one table: what is raised, and what it must say."""

import logging
import pathlib
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jflash
from jflash import _autodiff, _dispatch
from jflash._semantics.mask_mod import trace_mask_mod

B, T, S, N, K, H, D = 2, 4, 5, 4, 2, 8, 6
KEY = jax.random.key(0)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


GOOD = dict(query=zeros(B, T, N, H), key=zeros(B, S, K, H), value=zeros(B, S, K, D))
SHAPES = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, D))


class Unreferable:
    """Weak references cannot follow it."""

    __slots__ = ()

    def __call__(self, logit: Any, *_: Any) -> Any:
        return logit


def printing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A `mask_mod` with a side effect."""
    jax.debug.print("{}", query)
    return key <= query


def tile_map(function: Any, shape: tuple[int, int, int, int]) -> jflash.TileMap:
    """A map that was made for calls of some size, as far as its sizes are concerned."""
    return jflash.TileMap((), np.ones((1, 1, 1, 1), np.int8), trace_mask_mod(function).mask_mod, shape)


def rows(names: str, error: type[Exception], rule: str, wrong: dict[str, Any], **others: Any) -> list[Any]:
    """Calls with something wrong in place of each of the named arguments, besides `others`. The message has to name
    the argument, state the rule, and after "Got" show the value as written in front of it here."""
    return [
        pytest.param(error, f"`{name}`", rule, got, {name: value, **others}, id=f"{name}: {got}")
        for name in names.split()
        for got, value in wrong.items()
    ]


ARRAY, NUMBERS = "a JAX or NumPy array", "an array of numbers"
FLOATING, INTEGERS = "a floating-point dtype", "an integer dtype"
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
    *rows("score_mod", TypeError, "a function", {"int": 3}),
    *rows("score_mod", TypeError, "f(logit, batch, head, query_index, key_index)", {"<function": lambda logit: logit}),
    *rows("score_mod", TypeError, "one floating-point logit", {"('float32[]', 'int32[]')": lambda x, b, *_: (x, b)}),
    *rows("score_mod", TypeError, "one floating-point logit", {"None": lambda *_: None, "int32[]": lambda x, b, *_: b}),
    *rows(
        "score_mod",
        TypeError,
        "one floating-point logit",
        {"bool[]": lambda x, *_: x > 0, "complex64[]": lambda x, *_: x * 1j},
    ),
    *rows("score_mod", TypeError, "weak references", {"Unreferable": Unreferable()}),
    *rows(
        "score_mod",
        ValueError,
        "the shape must stay ()",
        {"(1,)": lambda x, *_: x[None], "(3,)": lambda x, *_: x + jnp.arange(3.0)},
    ),
    *rows("mask_mod", TypeError, "a function", {"int": 3}),
    *rows(
        "mask_mod", TypeError, "f(batch, head, query_index, key_index)", {"<function": lambda query, key: key <= query}
    ),
    *rows(
        "mask_mod",
        TypeError,
        "one bool",
        {"int32[]": lambda b, *_: b, "float32[]": lambda *_: jnp.float32(1), "None": lambda *_: None},
    ),
    *rows("mask_mod", TypeError, "one bool", {"('bool[]', 'bool[]')": lambda b, h, q, k: (k <= q, k == q)}),
    *rows(
        "mask_mod",
        ValueError,
        "the shape must be ()",
        {"(1,)": lambda b, h, q, k: (k <= q)[None], "(4,)": lambda b, h, q, k: jnp.arange(4) <= q},
    ),
    *rows("mask_mod", TypeError, "no side effects", {"Debug": printing}),
    *rows(
        "mask_mod",
        ValueError,
        "jflash.tile_map(f, batch=2, heads=4, query_length=4, key_length=5)",
        {
            "query_length=5": tile_map(lambda b, h, q, k: k <= q, (1, 1, 5, 5)),
            "batch=1": tile_map(lambda b, h, q, k: k <= b, (1, 1, 4, 5)),
            "heads=2": tile_map(lambda b, h, q, k: k <= h, (1, 2, 4, 5)),
        },
    ),
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
P, PAGE_SIZE, WIDE = 7, 3, 2
PAGES = dict(
    key=zeros(P, PAGE_SIZE, K, H),
    value=zeros(P, PAGE_SIZE, K, D),
    page_table=ints(B, WIDE),
    key_value_seq_lengths=ints(B),
)
OF_PAGES = "a paged cache must have the shape (P, page_size, K, H)"
NARROW = "the dtype of `query` or one of int8, float8_e4m3fn, float8_e5m2"


def with_pages(names: str, error: type[Exception], rule: str, wrong: dict[str, Any], **others: Any) -> list[Any]:
    """`rows` of calls that are right but for these arguments, with a paged cache."""
    return rows(
        names,
        error,
        rule,
        wrong,
        **{name: array for name, array in PAGES.items() if name not in names.split()} | others,
    )


TABLE += [
    *rows("k_scale v_scale", ValueError, "belongs to a paged cache", {"without `page_table`": 2.0}),
    *with_pages("key value", TypeError, ARRAY, {"list": [1.0]}),
    *with_pages(
        "key value",
        ValueError,
        OF_PAGES,
        {str((2, 5, 2, 8, 1)): zeros(2, 5, 2, 8, 1)},
    ),
    *with_pages(
        "key value",
        ValueError,
        OF_PAGES,
        {"(0, 3, 2, 8)": zeros(0, 3, 2, 8)},
    ),
    *with_pages("key value", TypeError, "one of the dtypes", {"uint8": zeros(P, PAGE_SIZE, K, H, dtype=np.uint8)}),
    *with_pages("key value", TypeError, NARROW, {"float16 and float32": zeros(P, PAGE_SIZE, K, H, dtype=np.float16)}),
    *with_pages("value", TypeError, "the same dtype", {"float32 and int8": zeros(P, PAGE_SIZE, K, D, dtype=np.int8)}),
    *with_pages("key", ValueError, "the same head dimension", {"H=8 and H=9": zeros(P, PAGE_SIZE, K, 9)}),
    *with_pages(
        "value",
        ValueError,
        "must have the same pages",
        {"[8, 3, 2]": zeros(8, PAGE_SIZE, K, D)},
    ),
    *with_pages("query", ValueError, "a multiple of the key heads", {"N=3 and K=2": zeros(B, T, 3, H)}),
    *with_pages(
        "key",
        ValueError,
        "a key and a value for each head",
        {"(7, 3, 1, 8)": zeros(P, PAGE_SIZE, 1, H)},
        value=None,
    ),
    *with_pages("page_table", TypeError, INTEGERS, {"float32": zeros(B, WIDE)}),
    *with_pages("page_table", TypeError, ARRAY, {"list": [[1, 2]]}),
    *with_pages("page_table", ValueError, "the shape (*B, pages)", {"(2,)": ints(B), "(3, 2)": ints(3, WIDE)}),
    *with_pages("key_value_seq_lengths", ValueError, "must be given with `page_table`", {"None": None}),
    *with_pages("key_value_seq_lengths", ValueError, "between 0 and S=6", {"0 to 7": np.array([0, 7])}),
    *with_pages("sequence_axis", ValueError, "each needs a paged cache whole", {"'x'": "x"}),
    *with_pages("k_scale v_scale", TypeError, "a number or a floating array", {"'x'": "x", "True": True}),
    *with_pages("k_scale v_scale", TypeError, FLOATING, {"int32": ints(K)}),
    *with_pages("k_scale v_scale", ValueError, "finite", {"nan": np.nan}),
    *with_pages(
        "k_scale v_scale", ValueError, "broadcastable to one for each page", {"(3,)": zeros(3), "(2, 7)": zeros(K, P)}
    ),
]


@pytest.fixture
def _nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any) -> NoReturn:
        raise AssertionError("the call was wrong, and was computed")

    monkeypatch.setattr(_autodiff, "attend", attend)


def assert_own(caught: pytest.ExceptionInfo[Exception]) -> None:
    package = pathlib.Path(jflash.__file__).parent
    assert caught.traceback[-1].path.is_relative_to(package), "not an error from inside JAX"


@pytest.mark.usefixtures("_nothing_may_run")
@pytest.mark.parametrize(("error", "name", "rule", "got", "arguments"), TABLE)
def test_wrong_argument(error: type[Exception], name: str, rule: str, got: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        jflash.attention(**{**GOOD, **arguments})
    message = str(caught.value)
    assert type(caught.value) is error
    assert name in message
    assert rule in message
    assert got in message.partition("Got ")[2]
    assert_own(caught)
    with pytest.raises(error) as explained:
        jflash.explain(**{**GOOD, **arguments})
    assert str(explained.value) == message


@pytest.mark.usefixtures("_nothing_may_run")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("is_causal", "deterministic", "return_residual")),
        *(("local_window_size", 3), ("local_window_size", (3, 0)), ("logits_soft_cap", 2.0), ("dropout_rate", 0.5)),
    ],
)
def test_traced_where_it_must_be_known(name: str, value: Any) -> None:
    for function in (jflash.attention, jflash.explain):
        with pytest.raises(TypeError, match=f"`{name}` must be known when the call is traced.*Got a traced") as caught:
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


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_error_inside_a_function(name: str) -> None:
    """It is the user's, and says where it happened."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("my own")

    for function in (jflash.attention, jflash.explain):
        with pytest.raises(RuntimeError, match="my own") as caught:
            function(**GOOD, **{name: fails})
        assert any(f"`{name}`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_traced_condition_inside_a_function(name: str) -> None:
    def branches(*indices: Any) -> Any:
        return indices[0] if indices[-1] > 0 else -indices[0]

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jflash.attention(**GOOD, **{name: branches})
    assert any("jnp.where" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("heads", -1), ("query_length", 0), ("key_length", 2.5)])
def test_sizes_of_a_tile_map(name: str, value: Any) -> None:
    sizes = dict(query_length=4, key_length=5) | {name: value}
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be a positive integer.*Got {value}"):
        jflash.tile_map(lambda b, h, q, k: k <= q, **sizes)


@pytest.mark.parametrize("function", [jflash.attention, jflash.explain], ids=lambda function: function.__name__)
def test_unknown_argument(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected keyword argument 'dropout'"):
        function(**GOOD, dropout=0.5)
