"""`ragged_paged_attention`: every sequence of a step as if it were alone, and one program for every step."""

import functools
import inspect
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paged
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as for_tpus
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from short_run import cover

import jflash
from jflash import _ragged_attention

MIXED = [(5, 18), (1, 129), (70, 97), (1, 122), (0, 4), (1, 64), (32, 40), (1, 1), (3, 59), (0, 0), (7, 7)]
DECODE = [(1, 18), (1, 129), (1, 297), (1, 1), (1, 64)]
PREFILL = [(130, 130), (61, 200)]
STEPS: dict[str, dict[str, Any]] = {
    "mixed": dict(lengths=MIXED, page_size=16, sinks=np.linspace(-2, 3, 4).astype(np.float32), sm_scale=0.25),
    "mixed, window, cap": dict(
        lengths=MIXED, page_size=3, sliding_window=33, soft_cap=5.0, sm_scale=0.3, dtype="bfloat16"
    ),
    "decode": dict(lengths=DECODE, page_size=16, interleaved=True, dtype="bfloat16"),
    "decode, nothing spare": dict(lengths=DECODE, page_size=64, spare=(0, 0), heads=(3, 3), dims=(16, 24)),
    "prefill": dict(lengths=PREFILL, page_size=1, dtype="float16", heads=(8, 1), sm_scale=0.25),
    "prefill, window": dict(lengths=PREFILL, page_size=256, interleaved=True, sliding_window=1),
    "one": dict(lengths=[(9, 30)], page_size=8, spare=(0, 0)),
    "none": dict(lengths=[(0, 0)], page_size=8),
}


@pytest.fixture(params=[pytest.param("reference", marks=cover(0)), "xla"])
def serving(request: pytest.FixtureRequest) -> str:
    return request.param


def run(implementation: str, arguments: dict[str, Any]) -> Any:
    return jflash.ragged_paged_attention(**arguments, implementation=implementation, return_residual=True)


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_exact(serving: str, options: dict[str, Any]):
    step = paged.ragged(**options)
    paged.assert_ragged_right(run(serving, step.arguments), step)


def test_8_bits(serving: str):
    """The numbers of a cache in bfloat16, which are what 8 bits hold, times a power of two."""
    step = paged.ragged(MIXED, 16, interleaved=True, dtype="bfloat16")
    narrow = step.arguments["kv_pages"].astype(jnp.float8_e4m3fn)
    wide = step.arguments | dict(kv_pages=(narrow.astype(np.float32) * 2).astype(jnp.bfloat16))
    scaled = step.arguments | dict(kv_pages=narrow, k_scale=2.0, v_scale=np.float32(2))
    for got, want in zip(run(serving, scaled), run(serving, wide), strict=True):
        np.testing.assert_array_equal(got, want)


def test_one_program_for_every_step():
    """One program serves all steps of as many tokens, sequences and pages: it deals them out when it runs."""
    attend = jax.jit(functools.partial(run, "xla"))
    shapes = set()
    for lengths in ([(30, 40), (2, 9), (1, 50)], [(1, 3)] * 5, [(0, 0)], [(40, 50)]):
        spare = 40 - sum(count for count, _ in lengths), 5 - len(lengths)
        arguments = paged.ragged([*lengths], 5, spare=spare).arguments
        table = np.full((5, 10), paged.GARBAGE, np.int32)
        table[:, : arguments["page_indices"].shape[1]] = arguments["page_indices"]
        pages = [np.pad(cache, ((0, 40 - len(cache)), *[(0, 0)] * 3)) for cache in arguments["kv_pages"]]
        step = paged.ragged([*lengths], 5, spare=spare)._replace(
            arguments=arguments | dict(page_indices=table, kv_pages=tuple(pages))
        )
        shapes |= {tuple(array.shape for array in jax.tree.leaves(step.arguments))}
        paged.assert_ragged_right(attend(step.arguments), step)
    assert len(shapes) == 1
    assert attend._cache_size() == 1


def test_arguments_are_those_of_the_tpu_kernel():
    """Names, order and defaults; what there is besides comes after them."""
    own, theirs = (
        list(inspect.signature(function).parameters.values())
        for function in (jflash.ragged_paged_attention, for_tpus.ragged_paged_attention)
    )
    simple = lambda parameters: [(p.name, p.kind, p.default) for p in parameters]
    assert simple(own)[: len(theirs)] == simple(theirs)


@cover(0)
@pytest.mark.parametrize("options", [dict(sliding_window=9), dict(soft_cap=5.0)], ids=str)
def test_what_the_tpu_kernel_means(options: dict[str, Any]):
    """By the reference of jax itself, which has no rows for what belongs to no sequence."""
    step = paged.ragged([(5, 18), (1, 30), (7, 7)], 16, interleaved=True, spare=(0, 0), **options)
    arguments = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in step.arguments.items()}
    arguments |= dict(page_indices=jnp.maximum(arguments["page_indices"], 0))
    got, _ = run("xla", arguments)
    want = for_tpus.ref_ragged_paged_attention(arguments.pop("q"), **arguments)
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=cover(0))])
def test_heads_over_devices(serving: str, axis_type: AxisType):
    step = paged.ragged(MIXED, 16, sinks=np.linspace(-2, 3, 4).astype(np.float32))
    mesh = jax.make_mesh((2,), ("h",), axis_types=(axis_type,))
    place = lambda array, *axes: jax.device_put(array, NamedSharding(mesh, P(*axes)))
    arrays = {name: place(array) for name, array in step.arguments.items() if isinstance(array, np.ndarray)}
    arrays |= dict(
        q=place(step.arguments["q"], None, "h"),
        kv_pages=tuple(place(cache, None, None, "h") for cache in step.arguments["kv_pages"]),
    )
    out, lse = jax.jit(functools.partial(run, serving))(arrays)
    assert out.sharding.spec[1] == lse.sharding.spec[1] == "h"
    paged.assert_ragged_right((out, lse), step)


@pytest.mark.parametrize(
    "mapped",
    [("q",), pytest.param(("q", "kv_lens", "page_indices", "cu_q_lens"), marks=cover(0))],
    ids=["queries", "steps"],
)
def test_several_steps_by_vmap(serving: str, mapped: tuple[str, ...]):
    """Each as if it were alone: their tokens become one array, in which blocks of each step have their places."""
    steps = [paged.ragged(MIXED, 16, seed=seed).arguments for seed in range(3)]
    if "kv_lens" in mapped:
        # Another step: a token of no sequence before the first, one of its own less for the first, and the full pages
        # of the second the other way round.
        steps[1] = steps[0] | dict(q=steps[1]["q"], cu_q_lens=np.maximum(steps[0]["cu_q_lens"], 1))
        steps[1]["kv_lens"] = steps[0]["kv_lens"] - (np.arange(len(steps[0]["kv_lens"])) == 0)
        steps[1]["page_indices"] = steps[0]["page_indices"].copy()
        steps[1]["page_indices"][1, :8] = steps[0]["page_indices"][1, 7::-1]
    shared = {name: array for name, array in steps[0].items() if name not in mapped}
    each = [{name: step[name] if name in mapped else steps[0][name] for name in step} for step in steps[:2]]
    attend = lambda some: run(serving, {**shared, **some})
    got = jax.vmap(attend)({name: np.stack([arguments[name] for arguments in each]) for name in mapped})
    for index, arguments in enumerate(each):
        for one, all_steps in zip(run(serving, arguments), got, strict=True):
            np.testing.assert_allclose(all_steps[index], one, atol=1e-6)


def test_tokens_before_the_first_sequence(serving: str):
    """They belong to none, as those past the last, and so do all if there is no sequence."""
    step = paged.ragged(MIXED, 16)
    later = {**step.arguments, "q": np.pad(step.arguments["q"], ((3, 0), (0, 0), (0, 0)), constant_values=np.nan)}
    later["cu_q_lens"] = step.arguments["cu_q_lens"] + 3
    for got, want in zip(run(serving, later), run(serving, step.arguments), strict=True):
        np.testing.assert_array_equal(got[3:], want)
        np.testing.assert_array_equal(got[:3], want[-3:])
    out, lse = run(serving, later | dict(num_seqs=np.zeros(1, np.int32)))
    assert not out.any()
    assert (lse == -np.inf).all()


def test_a_derivative_is_refused():
    arguments = paged.ragged(DECODE, 16).arguments
    query = jnp.asarray(arguments.pop("q"))
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda query: jflash.ragged_paged_attention(query, **arguments).sum())(query)


def test_tuning_is_said_to_change_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_ragged_attention, "_said", set())
    arguments = paged.ragged(DECODE, 16).arguments
    with caplog.at_level(logging.INFO, "jflash"):
        for _ in range(2):
            jflash.ragged_paged_attention(**arguments, num_queries_per_block=32, mask_value=None)
    (record,) = [record for record in caplog.records if "TPU" in record.getMessage()]
    assert "`num_queries_per_block`" in record.getMessage()


def test_memory_grows_with_neither_pages_nor_table():
    """Nor does anything as large as the cache stand besides it, taken apart or not."""

    def used(pages: int, width: int) -> int:
        shape = lambda *axes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(axes, dtype)
        index = functools.partial(shape, dtype=jnp.int32)
        arrays = shape(64, 8, 64), shape(pages, 16, 4, 64), index(8), index(8, width), index(9), index(1)
        attend = functools.partial(jflash.ragged_paged_attention, implementation="xla")
        return jax.jit(attend).lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert used(4096, 256) + 8 * 16 * 768 * 4 >= used(16384, 1024)
    assert used(16384, 1024) < 16 * 2**20


GOOD = paged.ragged([(2, 5), (1, 3)], 4).arguments
ints = functools.partial(np.zeros, dtype=np.int32)


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (ValueError, "`sliding_window` must be positive. Got 0", dict(sliding_window=0)),
        (TypeError, "`sliding_window` must be a positive integer", dict(sliding_window=1.5)),
        (ValueError, "`soft_cap` must be positive and finite. Got 0", dict(soft_cap=0)),
        (TypeError, "`sm_scale` must be a number", dict(sm_scale="1")),
        (ValueError, "`sinks` must have one value for each query head", dict(sinks=np.zeros(3, np.float32))),
        (ValueError, r"`q` must have the shape \(tokens, N, H\)", dict(q=GOOD["q"][None])),
        (ValueError, "`q` heads must be a multiple", dict(q=GOOD["q"][:, :3])),
        (TypeError, r"`kv_pages\[0\]`.*the dtype of `q` or", dict(q=GOOD["q"].astype(np.float16))),
        (ValueError, "`q` and `kv_pages` must have the same head", dict(kv_pages=np.zeros((3, 4, 4, 8), np.float32))),
        (ValueError, "a key and a value for each head", dict(kv_pages=np.zeros((3, 4, 3, 16), np.float32))),
        (ValueError, "a pair of those of keys and values. Got 3", dict(kv_pages=(GOOD["kv_pages"][0],) * 3)),
        (ValueError, r"`kv_lens` must have the shape \(5,\)", dict(kv_lens=ints(4))),
        (ValueError, r"`cu_q_lens` must have the shape \(6,\)", dict(cu_q_lens=ints(5))),
        (ValueError, r"`num_seqs` must have the shape \(1,\)", dict(num_seqs=ints(2))),
        (TypeError, "`page_indices` must have an integer dtype", dict(page_indices=np.zeros((5, 2)))),
        (ValueError, "`v_scale` must be a number, or broadcastable", dict(v_scale=np.zeros(3, np.float32))),
        (ValueError, "`implementation` must name some of", dict(implementation="tpu")),
    ],
)  # fmt: skip
def test_wrong_argument(error: type[Exception], message: str, wrong: dict[str, Any]):
    with pytest.raises(error, match=message):
        jflash.ragged_paged_attention(**{**GOOD, **wrong})
