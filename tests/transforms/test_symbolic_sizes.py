"""Sizes that `jax.export` leaves open: one program for all of them, by the definition."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import H200
from operands import assert_same, normal
from short_run import cover

import jflash
from jflash import _platform
from jflash._platform import Platform

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(3, 1), query_offset=2),
    "dropout": dict(dropout_rate=0.5, dropout_key=jax.random.key(0)),
    "score_mod": dict(score_mod=lambda logit, batch, head, query, key: logit + jnp.cos(query - 2 * key)),
    "sinks, lengths": dict(sinks=normal(9, 4)),
}
SIZES = {"batch": ("b", 5, 7), "lengths": (2, "t", "s"), "all": ("b", "t", "s")}


def attend(query: Any, key: Any, lengths: Any, options: dict[str, Any], implementation: str | None = None) -> Any:
    more = dict(key_value_seq_lengths=lengths) if "sinks" in options else {}
    return jflash.attention(query, key, key, **options, **more, implementation=implementation, return_residual=True)


@cover(every=7, rest=2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_exported_once_for_all_sizes(sizes: tuple[Any, Any, Any], options: dict[str, Any]) -> None:
    """Called with two of them, and differentiated."""
    names = ", ".join(size for size in sizes if isinstance(size, str))
    given = dict(zip(names.split(", "), jax.export.symbolic_shape(names), strict=True))
    batch, length, keys = (given.get(size, size) for size in sizes)
    shapes = ((batch, length, 4, 8), jnp.float32), ((batch, keys, 2, 8), jnp.float32), ((batch,), jnp.int32)
    function = jax.jit(lambda query, key, lengths: attend(query, key, lengths, options))
    query, key, lengths = (jax.ShapeDtypeStruct(*each) for each in shapes)
    exported = jax.export.export(function)(query, key, lengths=lengths)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    for b, t, s in ((2, 5, 7), (3, 4, 9)):
        b, t, s = (own if isinstance(size, str) else size for own, size in zip((b, t, s), sizes, strict=True))
        query, key, seen = normal(0, b, t, 4, 8), normal(1, b, s, 2, 8), np.arange(1, b + 1, dtype=np.int32)
        plain = functools.partial(attend, options=options, implementation="xla")
        got, got_back = jax.vjp(functools.partial(again.call, lengths=seen), query, key)
        want, want_back = jax.vjp(functools.partial(plain, lengths=seen), query, key)
        assert_same(got, want)
        assert_same(got_back(want), want_back(want))


@pytest.mark.parametrize("platform", [Platform("cpu", "cpu", None), H200], ids=str)
def test_queries_on_pages(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number, on a cache of 8 bits, which on a Hopper GPU is another implementation's where they are few."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": platform})
    (length,) = jax.export.symbolic_shape("t")
    pages, table, lengths = np.arange(-128, 128, dtype=np.int8).reshape(2, 4, 2, 16), np.array([[1, 0]]), np.array([7])

    def attend_pages(query: Any) -> Any:
        return jflash.attention(query, pages, pages, page_table=table, key_value_seq_lengths=lengths)

    exported = jax.export.export(jax.jit(attend_pages))(jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float16))
    monkeypatch.undo()
    for number in (1, 3):
        query = normal(0, 1, number, 4, 16).astype(jnp.float16)
        assert_same(exported.call(query), attend_pages(query))


def test_other_implementations_refuse() -> None:
    (length,) = jax.export.symbolic_shape("t")
    array = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    assert "  xla: it plans tiles for sizes that are known, and t is symbolic." in jflash.explain(array, array, array)
    attend = jax.jit(lambda query: jflash.attention(query, query, query, implementation="xla"))
    with pytest.raises(NotImplementedError, match="t is symbolic"):
        jax.export.export(attend)(array)
