"""A `score_mod`, `mask_mod` or tile map that is wrong: what is raised, and what it must say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong_calls import GOOD, assert_refused, rows

import jflash
from jflash._semantics.mask_mod import trace_mask_mod


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


TABLE = [
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
]


@pytest.mark.parametrize(("error", "name", "rule", "got", "arguments"), TABLE)
def test_wrong_argument(error: type[Exception], name: str, rule: str, got: str, arguments: dict[str, Any]) -> None:
    assert_refused(error, name, rule, got, arguments)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_error_inside_a_function(name: str) -> None:
    """The error is the user's own, and a note says where it happened."""

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
