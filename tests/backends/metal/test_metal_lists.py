"""Lists of tiles in the Metal shaders: what is visited, what is masked, and that results are right between the tiles.

The emulator counts the matrix products of a launch, and the bytes that it reads of each buffer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from metal_shader import MISSING
from operands import assert_same
from short_run import cover

import jflash
from jflash_metal import _blocks, _ffi, _parts, _plan

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

attention = functools.partial(jflash.attention, implementation="metal")
CASE = Case(query_length=200, key_length=300, heads=(2, 1), dims=(16, 8))
"""Two by three tiles, of which those at the ends are cut."""
LENGTH, DIM = 384, 8


def blocks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Show whole tiles, and of the last rows nothing."""
    return (query // 128 == (key // 128 + 1) % 3) & (query < 300)


def staircase(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Show a triangle in every other tile, another one to each head."""
    return ((query // 128 + key // 128 + head) % 2 == 0) & (key % 128 <= query % 128)


def strides(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Show every entry other keys, and rows 40 to 99 nothing."""
    return ((query + key) % (3 + batch) == 0) & ((query < 40) | (query > 99))


def seen_by(function: Callable[..., Any], batch: int = 1, heads: int = 1, length: int = LENGTH) -> np.ndarray:
    indices = np.ogrid[:batch, :heads, :length, :length]
    return np.asarray(jnp.broadcast_to(function(*map(jnp.asarray, indices)), (batch, heads, length, length)))


def counted(**options: Any) -> dict[str, _ffi.Counters]:
    """The counts of each kernel of a call with one head of `DIM` features, forward and backward."""
    arrays = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, 1, DIM))
    out, pull_back = jax.vjp(lambda *arrays: attention(*arrays, **options), *arrays)
    jax.block_until_ready(out)
    _ffi.forget_counters()
    jax.block_until_ready(pull_back(attention(*arrays, **options)))
    return {counters.entry: counters for counters in _ffi.counters()}


def products_of(kernel: str, seen: np.ndarray, listed: int | None = None) -> int:
    """The matrix products for the tiles with a visible pair; with `listed` also for those beside one in a larger tile.

    Two products for each tile forward, three for dQ and four for dK and dV.
    """
    sizes = _blocks.blocks_of(4, DIM, DIM)
    block = dict(forward=sizes.forward, d_query=sizes.d_query, d_key_value=sizes.d_key_value)[kernel]
    seen = seen.T if kernel == "d_key_value" else seen
    by_tile = lambda rows, columns: seen.reshape(len(seen) // rows, rows, -1, columns).any((1, 3))
    if listed is None:
        tiles = by_tile(block.rows, block.columns).sum()
    else:
        tiles = by_tile(listed, listed).sum() * (listed // block.rows) * (listed // block.columns)
    each = (block.rows // 8) * (block.columns // 8) * (DIM // 8)
    return int(tiles) * each * dict(forward=2, d_query=3, d_key_value=4)[kernel]


KERNELS = "forward", "d_query", "d_key_value"


@pytest.mark.parametrize("function", [blocks, pytest.param(staircase, marks=cover(0))])
def test_only_what_a_function_shows_is_visited(function: Callable[..., Any]) -> None:
    """Empty parts are not visited, neither of tiles that are not listed nor of listed tiles that are seen in part."""
    found = counted(mask_mod=function)
    seen = seen_by(function)[0, 0]
    products = {kernel: found[kernel].matrix_multiplications for kernel in KERNELS}
    assert products == {kernel: products_of(kernel, seen) for kernel in KERNELS}


@cover(0)
def test_empty_tiles_of_a_dense_mask_are_not_visited() -> None:
    seen = seen_by(staircase)[0, 0] & (np.arange(LENGTH) < 200)
    found = counted(mask=seen)
    products = {kernel: found[kernel].matrix_multiplications for kernel in KERNELS}
    assert products == {kernel: products_of(kernel, seen, 128) for kernel in KERNELS}


def test_whole_tiles_carry_no_mask() -> None:
    """No bit of the function's is read, where every tile is seen whole or not at all, and no byte of a mask's."""
    whole = lambda batch, head, query, key: query // 128 == (key // 128 + 1) % 3
    for options, name in ((dict(mask_mod=whole), "tile_masks"), (dict(mask=seen_by(whole)[0, 0]), "mask")):
        found = counted(**options)
        assert [found[kernel].bytes_read[_plan.OPERANDS.index(name)] for kernel in KERNELS] == [0, 0, 0]


def with_function(function: Callable[..., Any], **options: Any) -> oracle.Call:
    return dataclasses.replace(cases.build(CASE._replace(**options)), mask_mod=function)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (strides, dict(query_length=140, bias="full", causal=True, offset="each")),
        pytest.param(staircase, dict(bias="full", dims=(256, 256), query_length=140, batch=(1,)), marks=cover(0)),
        pytest.param(strides, dict(bias="heads", lengths="both", segments="unsorted", mask="keys"), marks=cover(0)),
        pytest.param(blocks, dict(mask="full", window=(60, 90), sinks=True, dtype="bfloat16"), marks=cover(0)),
    ],
)
def test_exact(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """The gradient of a bias, too, which is written where no tile is visited."""
    call = with_function(function, **options)
    oracle.assert_right(oracle.run(attention, call), call)


@cover(0)
def test_gradient_of_a_shared_bias() -> None:
    """The kernel of a shared bias looks up each tile in the lists of all batch entries and heads."""
    call = with_function(strides)
    call = dataclasses.replace(call, bias=np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32))
    oracle.assert_right(oracle.run(attention, call), call)


def small(length: int = 150) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (2, length, 1, 8))


@cover(0)
def test_closed_over_arrays_may_be_mapped() -> None:
    """Each entry of the map has a function of its own, and lists and masks of its own."""

    def loss(query: Any, window: Any, implementation: str) -> Any:
        mask = lambda batch, head, q, k: jnp.abs(q - k) < window[batch]
        attend = functools.partial(jflash.attention, mask_mod=mask, implementation=implementation)
        return jnp.sum(attend(query, query, query) ** 2)

    queries, windows = jnp.stack([small(), -small()]), jnp.array([[5, 200], [70, 1]])
    gradient = lambda name: jax.jit(jax.vmap(jax.grad(functools.partial(loss, implementation=name))))(queries, windows)
    assert_same(gradient("metal"), gradient("reference"))


@cover(0)
def test_a_map_made_before_and_an_exported_call() -> None:
    tiles = jflash.tile_map(staircase, query_length=150, key_length=150)
    attend = jax.jit(lambda query: attention(query, query, query, mask_mod=tiles))
    unpromised = [export.DisabledSafetyCheck.custom_call("jflash_metal_launch")]
    exported = export.export(attend, disabled_checks=unpromised)(small())
    want = jflash.attention(*[small()] * 3, mask_mod=staircase, implementation="reference")
    assert_same(exported.call(small()), want)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (strides, dict(key_length=140, bias="full", causal=True, lengths="both", sinks=True, dtype="bfloat16")),
        pytest.param(
            staircase, dict(bias="keys", alibi=True, scale="traced", offset="each", query_length=256), marks=cover(0)
        ),
    ],
)
def test_exact_in_parts(function: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have 128 queries here."""
    monkeypatch.setattr(_parts, "MOST_BYTES", 0)
    jax.clear_caches()
    call = with_function(function, **options)
    _ffi.forget_counters()
    oracle.assert_right(oracle.run(attention, call), call)
    assert [counters.entry for counters in _ffi.counters()].count("forward") == 2
    jax.clear_caches()


@cover(0)
def test_cotangents_of_hidden_queries_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes of them, whatever they are."""
    monkeypatch.setattr(_parts, "MOST_BYTES", 0)
    jax.clear_caches()
    query = small(200)
    _, pull_back = jax.vjp(lambda *arrays: attention(*arrays, mask_mod=strides), query, query, query)
    of = lambda value: pull_back(jnp.ones_like(query).at[:, 40:100].set(value))
    jax.tree.map(np.testing.assert_array_equal, of(np.nan), of(0.0))
    jax.clear_caches()


@cover(0)
@pytest.mark.parametrize("batch_too", [False, True])
def test_sequences_split_over_devices(batch_too: bool) -> None:
    """Indices are those of the whole call, and chunks need not begin with a tile."""
    mesh = jax.make_mesh((2, 2), ("batch", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    query = small(360)
    split = jax.device_put(query, NamedSharding(mesh, PartitionSpec("batch" if batch_too else None, "context")))

    def gradients(query: Any, implementation: str) -> Any:
        attend = functools.partial(jflash.attention, mask_mod=strides, implementation=implementation)
        return jax.jit(jax.grad(lambda query: jnp.sin(attend(query, query, query)).sum()))(query)

    assert_same(gradients(split, "metal"), gradients(query, "reference"))


@cover(0)
def test_memory_is_bounded() -> None:
    """The bits of each part take 32 MiB, however long the sequences are."""

    def used(length: int) -> int:
        heads = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        attend = functools.partial(attention, mask_mod=lambda b, h, q, k: q % 7 < k % 5)
        return jax.jit(attend).lower(heads, heads, heads).compile().memory_analysis().temp_size_in_bytes

    of_pairs = 64 * 128 * 128 * 16
    assert used(2**14) < 2**25 + of_pairs + 2**22
    assert used(2**16) < 2**25 + of_pairs + 2**25
