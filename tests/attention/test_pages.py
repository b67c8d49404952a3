"""Calls with a paged cache: the definition by shuffled pages, what may be read, and what transforms make of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_attention import Results
from short_run import cover

import jflash
from jflash._backends import xla
from jflash._semantics import pages

SERVING = [pytest.param("reference", marks=cover(0)), "xla"]
SMALL = Case(query_length=5, key_length=48, heads=(4, 2), dims=(24, 24), batch=(2, 3))
CASES: dict[str, tuple[Case, int]] = {
    "plain": (SMALL, 3),
    "one query": (SMALL._replace(query_length=1, dtype="bfloat16"), 16),
    "causal": (SMALL._replace(causal=True, offset="each", dims=(24, 40), soft_cap=1.5), 1),
    "window": (SMALL._replace(query_length=13, window=(7, 0), offset="each", sinks=True, dtype="float16"), 16),
    "arrays": (SMALL._replace(bias="full", mask="keys", scale="traced", alibi=True, segments="unsorted"), 8),
    "functions": (SMALL._replace(score_mod="arrays", dropout=True, causal=True, offset="each"), 48),
    "padding": (SMALL._replace(lengths="queries", heads=(3, 3), bias="keys"), 12),
    "a length that no page divides": (SMALL._replace(key_length=41), 16),
    "everything": (cases.EVERYTHING._replace(query_length=7, key_length=48, dtype="bfloat16", window=(20, 0)), 16),
    "many tiles": (SMALL._replace(query_length=3, key_length=1536, causal=True, offset="end", dtype="bfloat16"), 64),
    "many tiles, window": (
        SMALL._replace(query_length=600, key_length=1200, window=(300, 5), heads=(2, 1), batch=(3,)),
        1,
    ),
}
"""With the keys of a page."""


@pytest.fixture(params=SERVING)
def serving(request: pytest.FixtureRequest) -> str:
    return request.param


def run(implementation: str, arguments: dict[str, Any]) -> Results:
    attend = functools.partial(jflash.attention, implementation=implementation, return_residual=True)
    return Results(*attend(**arguments), {})


@pytest.mark.parametrize(("case", "page_size"), CASES.values(), ids=CASES)
def test_exact(serving: str, case: Case, page_size: int):
    """In shuffled pages, some full and some not, with garbage past every end."""
    call = paged.with_lengths(cases.build(case))
    oracle.assert_right(run(serving, paged.paginate(call, page_size)), call)


def test_interleaved(serving: str):
    call = paged.with_lengths(cases.build(SMALL._replace(causal=True, offset="each", dtype="bfloat16")))
    oracle.assert_right(run(serving, paged.paginate(call, 16, interleaved=True)), call)


def test_float64(serving: str):
    with jax.enable_x64(True):
        call = paged.with_lengths(cases.build(SMALL._replace(dtype="float64", sinks=True)))
        oracle.assert_right(run(serving, paged.paginate(call, 16)), call)


SCALES: dict[str, Callable[[int, int], Any]] = {
    "none": lambda pages, heads: None,
    "number": lambda pages, heads: 0.25,
    "traced": lambda pages, heads: jnp.float32(0.3),
    "heads": lambda pages, heads: 0.05 + np.arange(heads, dtype=np.float32) / 16,
    "pages": lambda pages, heads: 0.05 + np.arange(pages, dtype=np.float32)[:, None] / 64,
    "both": lambda pages, heads: 0.05 + np.arange(pages * heads, dtype=np.float32).reshape(pages, heads) / 128,
}


@pytest.mark.parametrize(
    ("dtype", "stored", "interleaved", "scale"),
    [
        ("bfloat16", "int8", False, "both"),
        ("bfloat16", "float8_e4m3fn", True, "number"),
        pytest.param("bfloat16", "float8_e5m2", False, "none", marks=cover(0)),
        ("bfloat16", "bfloat16", True, "pages"),
        ("float16", "float8_e4m3fn", False, "heads"),
        pytest.param("float16", "int8", True, "traced", marks=cover(0)),
        ("float32", "float8_e4m3fn", False, "both"),
        pytest.param("float32", "int8", False, "number", marks=cover(0)),
    ],
)
def test_scaled_and_8_bits(serving: str, dtype: str, stored: str, interleaved: bool, scale: str):
    call = cases.build(SMALL._replace(dtype="float32", causal=True, offset="each"))
    call = paged.of_8_bits(paged.with_lengths(call), stored)
    call = dataclasses.replace(call, query=call.query.astype(dtype))
    arguments = paged.paginate(call, 16, dtype=stored, interleaved=interleaved)
    of_key, of_value = (SCALES[scale](arguments["key"].shape[0], call.key.shape[-2]) for _ in range(2))
    arguments |= dict(k_scale=of_key, v_scale=None if of_value is None else 3 * of_value)
    paged.assert_scaled_right(run(serving, arguments), call, arguments)


def test_transforms_give_the_same(serving: str):
    """jit, vmap over what shares the pages and over pages too, scan, and a nested vmap."""
    call = paged.with_lengths(cases.build(SMALL._replace(causal=True, offset="each", batch=(3,))))
    arguments = paged.paginate(call, 16)
    arrays = {name: jnp.asarray(array) for name, array in arguments.items() if isinstance(array, np.ndarray)}
    rest = {name: option for name, option in arguments.items() if name not in arrays}
    attend = lambda arrays: jflash.attention(**rest, **arrays, implementation=serving, return_residual=True)
    want = attend(arrays)
    same = lambda got, want: jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)
    same(jax.jit(attend)(arrays), want)
    shared = {name: array for name, array in arrays.items() if name in ("key", "value")}
    own = {name: array for name, array in arrays.items() if name not in shared}
    stack = lambda tree: jax.tree.map(lambda array: jnp.stack([array, array]), tree)
    of_entries = jax.vmap(lambda own: attend({**own, **shared}))
    same(of_entries(own), want)
    same(jax.vmap(of_entries)(stack(own)), stack(want))
    same(jax.vmap(attend)(stack(arrays)), stack(want))
    _, got = jax.lax.scan(lambda carry, own: (carry, attend({**own, **carry})), shared, stack(own))
    same(got, stack(want))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_over_devices(serving: str, axis_type: AxisType):
    """Pages are whole on each device but for their heads."""
    call = paged.with_lengths(cases.build(SMALL._replace(causal=True, offset="each", batch=(4,), sinks=True)))
    arguments = paged.paginate(call, 16) | dict(k_scale=SCALES["both"](15, 2), v_scale=np.float32([[2.0, 3.0]]))
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(axis_type,) * 2)
    parts = dict(query=P("b", None, "h"), key=P(None, None, "h"), value=P(None, None, "h"), page_table=P("b"))
    arrays = {
        name: jax.device_put(array, NamedSharding(mesh, parts.get(name, P())))
        for name, array in arguments.items()
        if isinstance(array, np.ndarray)
    }
    rest = {name: option for name, option in arguments.items() if name not in arrays}
    attend = jax.jit(lambda arrays: jflash.attention(**rest, **arrays, implementation=serving, return_residual=True))
    compiled = attend.lower(arrays).compile()
    got, want = compiled(arrays), run(serving, arguments)
    for mine, theirs in zip(got, want, strict=False):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    if serving == "xla":
        assert "all-gather" not in compiled.as_text()


def test_a_derivative_is_refused(serving: str):
    call = paged.with_lengths(cases.build(SMALL))
    arguments = paged.paginate(call, 16)
    query = arguments.pop("query")
    attend = lambda query: jflash.attention(query, **arguments, implementation=serving).sum()
    for differentiate in (jax.grad(attend), lambda query: jax.jvp(attend, (query,), (query,))):
        with pytest.raises(NotImplementedError, match=r"no derivative.*gather the keys and values"):
            differentiate(jnp.asarray(query))
    # Nothing moves here.
    jax.grad(lambda weight: weight * attend(query))(1.0)


def paged_shapes(pages: int, *, width: int, interleaved: bool, batch: int = 8) -> dict[str, Any]:
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
    heads = (4, 64) if interleaved else (2, 64)
    return dict(
        query=shape(batch, 1, 8, 64),
        key=shape(pages, 16, *heads),
        value=None if interleaved else shape(pages, 16, *heads),
        page_table=shape(batch, width, dtype=jnp.int32),
        key_value_seq_lengths=shape(batch, dtype=jnp.int32),
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_memory_grows_with_neither_pages_nor_table(interleaved: bool):
    """The memory of `xla` does not grow, and no part of the cache is copied to take it apart."""

    def used(pages: int, width: int) -> int:
        shapes = paged_shapes(pages, width=width, interleaved=interleaved)
        absent = {name: shapes.pop(name) for name in ("value",) if shapes[name] is None}
        attend = lambda arrays: jflash.attention(**arrays, **absent, implementation="xla")
        return jax.jit(attend).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    assert used(4096, 256) == used(16384, 1024) < 16 * 2**20


def test_no_tile_past_the_longest_length(monkeypatch: pytest.MonkeyPatch):
    """Though the table has room for many more."""
    taken, load = [], pages.load

    def counted(spec: Any, operands: Any, corner: Any, shape: Any) -> Any:
        jax.debug.callback(lambda batch, key: taken.append((int(batch), int(key))), corner.batch, corner.key)
        return load(spec, operands, corner, shape)

    monkeypatch.setattr(pages, "load", counted)
    shapes = paged_shapes(600, width=500, interleaved=False, batch=2)
    arrays = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    tile = xla.plan(jflash._canonical.canonicalize(**arrays)[0], "forward")
    for longest, most in ((0, 0), (1, 1), (tile.keys, 1), (3 * tile.keys + 1, 4)):
        taken.clear()
        jflash.attention(**arrays | dict(key_value_seq_lengths=jnp.array([1, longest])), implementation="xla")
        jax.effects_barrier()
        starts = {key for batch, key in taken if batch == 2 - tile.batch}
        assert len(starts) == max(most, tile.batch - 1), (longest, taken)


def test_explain(serving: str):
    call = paged.with_lengths(cases.build(SMALL))
    arguments = paged.paginate(call, 16)
    told = jflash.explain(**arguments, implementation=serving, verbose=True)
    assert told.startswith(f"{serving} serves")
    assert "backward" not in told
    assert told.endswith("derivatives: none of a call with pages")
