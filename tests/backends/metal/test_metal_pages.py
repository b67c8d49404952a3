"""Paged caches in the Metal shader: right for every layout, and nothing read that no length reaches.

The emulator rejects an access out of bounds, so a page that is looked up past a length, where the table holds garbage,
would be one of the cache's and would show as NaN.
"""

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from jax import export
from metal_shader import MISSING
from operands import assert_same
from plain_attention import Results
from short_run import cover

import jflash
from jflash import _platform
from jflash._platform import Platform
from jflash_metal import _ffi, _plan

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

attention = functools.partial(jflash.attention, implementation="metal", return_residual=True)
SMALL = Case(query_length=5, key_length=48, heads=(4, 2), dims=(24, 24), batch=(2, 3))
ARRAYS = SMALL._replace(bias="full", mask="full", scale="traced", alibi=True, segments="unsorted", dims=(17, 24))


def run(arguments: dict[str, Any]) -> Results:
    return Results(*attention(**arguments), {})


@pytest.mark.parametrize(
    ("case", "page_size", "interleaved"),
    [
        pytest.param(SMALL._replace(causal=True, offset="each", dims=(24, 40), soft_cap=1.5), 1, False, id="causal"),
        pytest.param(SMALL._replace(dtype="bfloat16", query_length=1), 16, True, id="interleaved", marks=cover(0)),
        pytest.param(ARRAYS, 16, False, id="arrays", marks=cover(0)),
        pytest.param(
            SMALL._replace(key_length=702, query_length=40, window=(300, 5), sinks=True, offset="end", batch=(3,)),
            7,
            False,
            id="many tiles",
            marks=cover(0),
        ),
    ],
)
def test_exact(case: Case, page_size: int, interleaved: bool) -> None:
    """In shuffled pages, some full and some not, with garbage past every end."""
    call = paged.with_lengths(cases.build(case))
    oracle.assert_right(run(paged.paginate(call, page_size, interleaved=interleaved)), call)


@cover(0)
def test_exact_with_a_mask_function() -> None:
    call = paged.with_lengths(cases.build(SMALL._replace(key_length=150, batch=(3,))))
    call = dataclasses.replace(call, mask_mod=lambda batch, head, query, key: (key + query) % 3 != batch)
    oracle.assert_right(run(paged.paginate(call, 16)), call)


@pytest.mark.parametrize(
    ("stored", "interleaved", "scale"),
    [("int8", False, "each"), pytest.param("float32", True, "one", marks=cover(0))],
)
def test_scaled(stored: str, interleaved: bool, scale: str) -> None:
    """Numbers of the cache times their scales are the same numbers without a cache."""
    call, numbers = paged.with_lengths(cases.build(SMALL)), np.random.default_rng(0)
    held = {name: numbers.integers(-9, 10, getattr(call, name).shape).astype(np.float32) for name in ("key", "value")}
    call = dataclasses.replace(call, **held)
    arguments = paged.paginate(call, 16, dtype=stored, interleaved=interleaved)
    shape = (len(arguments["key"]), call.key.shape[-2])
    # Powers of two, so that the products are exact.
    of_key = np.exp2(numbers.integers(-4, 0, shape)).astype(np.float32) if scale == "each" else 0.25
    of_value = np.exp2(numbers.integers(-2, 2, shape)).astype(np.float32) if scale == "each" else np.float32([[2, 4]])
    pages = np.maximum(arguments["page_table"], 0)
    widen = lambda array, scale: array * np.repeat(np.broadcast_to(scale, shape)[pages], 16, axis=-2)[..., None]
    wide = dataclasses.replace(
        call, key=widen(call.key, of_key).astype(np.float32), value=widen(call.value, of_value).astype(np.float32)
    )
    oracle.assert_right(run(arguments | dict(k_scale=of_key, v_scale=of_value)), wide)


def test_pages_past_a_length_are_not_read() -> None:
    """The table has room for many more keys than any sequence has."""
    read = []
    for room in (48, 480):
        call = cases.build(SMALL._replace(key_length=room, batch=(2,)))
        lengths = np.array([3, 40], np.int32)
        arguments = paged.paginate(dataclasses.replace(call, key_value_seq_lengths=lengths, d_out=None, d_lse=None), 16)
        _ffi.forget_counters()
        jax.block_until_ready(attention(**arguments))
        (counters,) = _ffi.counters()
        read.append([counters.bytes_read[_plan.OPERANDS.index(name)] for name in ("key", "value", "page_table")])
    # Each query head reads its own key head's rows once: all queries are in one block.
    assert read[0][:2] == [4 * 43 * 24 * 4] * 2
    assert read[0] == read[1]


@cover(0)
def test_transforms_and_an_exported_call() -> None:
    """Entries of a map share the pages, or have their own."""
    call = paged.with_lengths(cases.build(SMALL._replace(causal=True, offset="each", batch=(2,))))
    arguments = paged.paginate(call, 16)
    arrays = {name: jnp.asarray(array) for name, array in arguments.items() if isinstance(array, np.ndarray)}
    rest = {name: option for name, option in arguments.items() if name not in arrays}
    attend = lambda arrays: attention(**rest, **arrays)
    want = attend(arrays)
    unpromised = [export.DisabledSafetyCheck.custom_call("jflash_metal_launch")]
    assert_same(export.export(jax.jit(attend), disabled_checks=unpromised)(arrays).call(arrays), want)
    shared = {name: array for name, array in arrays.items() if name in ("key", "value")}
    own = {name: array for name, array in arrays.items() if name not in shared}
    of_entries = jax.vmap(lambda own: attend({**own, **shared}))
    assert_same(of_entries(own), want)
    stack = lambda tree: jax.tree.map(lambda array: jnp.stack([array, array]), tree)
    assert_same(jax.vmap(attend)(stack(arrays)), stack(want))


def test_in_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for jax-graft's platform."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": Platform("mtl", "Apple M4", None)})
    call = paged.with_lengths(cases.build(SMALL._replace(batch=(3,))))
    oracle.assert_right(run(paged.paginate(call, 16)), call)


@cover(0)
def test_ragged() -> None:
    """Prefill and decode of several sequences are a call with pages, by blocks of their tokens."""
    step = paged.ragged([(9, 30), (1, 17), (1, 1)], 8, sliding_window=20, sinks=np.float32([0, 1, 2, 3]))
    results = jflash.ragged_paged_attention(**step.arguments, implementation="metal", return_residual=True)
    paged.assert_ragged_right(results, step)


def test_float8_is_refused() -> None:
    arguments = paged.paginate(paged.with_lengths(cases.build(SMALL)), 16, dtype=jnp.float8_e4m3fn)
    assert "Metal has no float8_e4m3fn" in jflash.explain(**arguments, implementation="metal")


def test_explain() -> None:
    arguments = paged.paginate(paged.with_lengths(cases.build(SMALL)), 16)
    told = jflash.explain(**arguments, implementation="metal", verbose=True)
    assert told.startswith("metal serves")
    assert "HAS_PAGES" in told
    assert "backward" not in told
