"""The Hopper kernels of wide heads, of more than 256 columns or of as many in pieces of float32: their plans, and the
kernels in Pallas' interpreter."""

import dataclasses
import functools
import itertools
from typing import Any

import cases
import hopper_kernels
import jax.numpy as jnp
import numpy as np
import oracle
import parts
import pytest
from cases import Case
from kernel_values import INTERPRETED
from short_run import cover

from jflash._backends import mosaic_gpu
from jflash._backends.mosaic_gpu import plan, smem
from jflash._backends.mosaic_gpu.backward_wide_plan import WidePlan
from jflash._backends.mosaic_gpu.column_chunks import ColumnChunks
from jflash._backends.mosaic_gpu.forward_wide_plan import WideForwardPlan
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.spec import Spec

DIMS = ((512, 512), (576, 512), (320, 320), (257, 64), (64, 512))
# Of what follows the matrix unit's products, which all kernels share, fewer kinds.
VALUES = {
    **INTERPRETED,
    "dtype": ("bfloat16", "float16"),
    "query_length": (1, 70),
    "key_length": (17, 131, 200),
    "dims": DIMS,
    "scale": (None, "traced"),
    "soft_cap": (None, 1.5),
    "bias": (None, "full", "keys", "queries"),
    "mask": (None, "full", "keys"),
    "offset": (None, "each"),
}
# Wide in three pieces the first, in two the second, in both the third.
FLOAT32 = {**VALUES, "dtype": ("float32",), "dims": ((192, 192), (256, 256), (32, 288))}
# Two blocks of queries, and the general form of logits.
GENERAL = dict(soft_cap=1.5, mask="full", causal=True, sinks=True)
IN_SHORT_RUN = Case("bfloat16", 70, 40, (2, 1), (64, 320), (1,), **GENERAL)
CASES = [
    IN_SHORT_RUN,
    *(Case(batch=(2,), **row) for row in cases.product(VALUES, 2)),
    *(Case(batch=(1,), **row) for row in [*cases.product(FLOAT32, 2)][::2]),
]


@cover(rest=16)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == IN_SHORT_RUN else cover(0)) for case in CASES], ids=str
)
def test_wide(case: Case):
    call = cases.build(case)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@cover(0)
def test_two_pieces():
    """The other cases of float32 are dearer."""
    call = cases.build(Case("float32", 40, 40, (1, 1), (32, 288), (1,), causal=True))
    oracle.assert_right(hopper_kernels.run(call), call, as_tf32=True)


@cover(every=9)
@pytest.mark.parametrize(
    ("dtype", "dims", "heads", "query_length", "processors"),
    [
        ("bfloat16", (576, 512), (16, 1), 1, 8),
        # More heads than rows of a block: two blocks.
        ("bfloat16", (576, 512), (128, 1), 1, 8),
        ("bfloat16", (512, 512), (24, 2), 3, 1),
        pytest.param("float32", (256, 256), (16, 1), 1, 8, marks=cover(0)),
    ],
    ids=str,
)
def test_decoding(dtype: str, dims: tuple[int, int], heads: tuple[int, int], query_length: int, processors: int):
    """Heads packed into rows, keys in several splits, lengths for each sequence."""
    case = Case(dtype, query_length, 600, heads, dims, (1,), causal=True, offset="end", lengths="keys")
    call = cases.of_forward(cases.build(case))
    spec, _ = hopper_kernels.canonical(call)
    found = plan.plan_forward(spec, processors).plan
    assert found.packed_heads > 1
    assert (found.division.pieces > 0) == (processors > 1)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, processors), call)


@cover(0, rest=2)
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((512, 512), dict(causal=True)),
        ((576, 512), dict(causal=True, segments="sorted", lengths="both")),
        ((320, 320), {}),
        ((576, 576), dict(causal=True)),
    ],
    ids=str,
)
def test_blocks_that_grow_go_in_pairs(dims: tuple[int, int], options: dict):
    """The last pair lacks a block. Tiles have 128 keys where registers hold products and up to 512 columns alone."""
    case = Case("bfloat16", 140, 300, heads=(2, 1), dims=dims, batch=(1,), **options)
    call = cases.of_forward(cases.build(case))
    found = plan.plan_forward(hopper_kernels.canonical(call)[0], 132).plan
    assert found.in_pairs == bool(options)
    assert found.schedule.blocks == (2 if options else 3)
    assert found.tile.keys == (64 if "lengths" in options or dims[1] > 512 else 128)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


@pytest.mark.parametrize(
    ("dtype", "dims", "options"),
    [
        ("bfloat16", (512, 512), {}),
        pytest.param("bfloat16", (320, 512), dict(offset="end", bias="full"), marks=cover(0)),
        pytest.param("float16", (576, 576), dict(dropout=True, sinks=True), marks=cover(0)),
        pytest.param("float32", (256, 256), {}, marks=cover(0)),
    ],
    ids=str,
)
def test_blocks_are_dealt_out(dtype: str, dims: tuple[int, int], options: dict):
    """Two pairs of CTAs share three pairs of blocks of each of two heads."""
    case = Case(dtype, 300, 340, heads=(2, 1), dims=dims, batch=(1,), causal=True, **options)
    call = cases.of_forward(cases.build(case))
    spec, _ = hopper_kernels.canonical(call)
    found = plan.plan_forward(spec, 4).plan
    assert found.dealt is not None
    assert sorted(place for places in found.dealt for place in places) == sorted(np.ndindex(2, 1, 3))
    assert len(found.dealt) == 2
    assert min(map(len, found.dealt)) > 1
    assert f"lists of up to {max(map(len, found.dealt))} blocks" in plan.describe(spec, 4)
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call, 4), call)


@cover(0)
def test_fewest_chunks():
    """Tiles of a float32 bias leave room for no more."""
    case = Case("float16", 131, 131, (1, 1), (576, 512), (1,), bias="full", mask="full", window=(40, 10))
    call = cases.build(case)
    call = dataclasses.replace(call, bias=call.bias.astype(np.float32))
    spec, _ = hopper_kernels.canonical(call)
    forward = plan.plan_forward(spec, 132).plan
    assert forward.tile.chunk_slots == forward.key_chunks.least
    oracle.assert_right(hopper_kernels.run(call), call)


def test_registers():
    """A CTA has 512 for a thread of each warpgroup together: who asks for more waits forever."""
    for value_dim in (64, 512, 576):
        weights, weigh, copy = plan.plan_forward(spec_of(512, value_dim), 132).plan.registers
        assert weights + 2 * weigh + copy == 512
        assert all(count % 8 == 0 for count in (weights, weigh, copy))


@cover(0, rest=2)
@pytest.mark.parametrize("moving", [None, ("value",)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [("bfloat16", (320, 320)), ("bfloat16", (257, 64)), ("bfloat16", (64, 512)), ("float32", (64, 288))],
    ids=str,
)
def test_tangents(dtype: str, dims: tuple[int, int], moving: tuple[str, ...] | None):
    """Tangents move all operands where those fit beside them, or values alone, which are a forward."""
    call = cases.build(Case(dtype, 70, 131, heads=(2, 1), dims=dims, batch=(1,), causal=True, offset="end"))
    every = oracle.draw_tangents(call)
    hopper_kernels.assert_tangents_right(call, {name: every[name] for name in moving or every})


@cover(0)
@pytest.mark.parametrize(
    ("dtype", "dims", "options"),
    [
        ("bfloat16", (320, 512), dict(causal=True)),
        ("float32", (160, 192), dict(bias="full", lengths="both", dropout=True)),
    ],
    ids=str,
)
def test_a_part(dtype: str, dims: tuple[int, int], options: dict):
    """A part belongs to a call whose sequences are split over devices, as tests/backends/test_partial.py has it."""
    call = cases.build(Case(dtype, 70, 64, heads=(2, 2), dims=dims, batch=(2,), **options))
    run = lambda **precision: parts.run(call, *hopper_kernels.functions(), **precision)
    hopper_kernels.assert_right(run, call)


@cover(0, rest=2)
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [("bfloat16", (512, 512)), ("bfloat16", (576, 576)), ("bfloat16", (8, 512)), ("float32", (256, 256))],
    ids=str,
)
def test_head_groups(dtype: str, dims: tuple[int, int]):
    """Query heads that share keys, in groups whose dK and dV are summed in the end."""
    call = cases.build(Case(dtype, 70, 70, heads=(4, 1), dims=dims, batch=(1,), causal=True, bias="keys"))
    spec, _ = hopper_kernels.canonical(call)
    assert all(kernel.plan.stores_sums for kernel in plan.plan_backward(spec, 132)[1:])
    hopper_kernels.assert_right(functools.partial(hopper_kernels.run, call), call)


def spec_of(head_dim: int, value_dim: int, **options: object) -> Spec:
    shapes = dict(query=(2, 300, 4, head_dim), key=(2, 200, 2, head_dim), value=(2, 200, 2, value_dim))
    dtype = options.pop("dtype", jnp.bfloat16)
    arrays = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    return hopper_kernels.canonical_arguments(**arrays, **options)[0]


@pytest.mark.parametrize(
    ("bias", "step"),
    [
        (jnp.bfloat16, 96),
        *(pytest.param(*row, marks=cover(0)) for row in ((None, 16), (jnp.bfloat16, 32), (jnp.float32, 32))),
    ],
)
def test_every_size_fits(bias: Any, step: int):
    """Tiles of every kernel are found for all H and D up to 576, one of them above 256; with tiles of a bias to 544."""
    options = {} if bias is None else dict(bias=jnp.zeros((1, 1, 300, 200), bias))
    plain = spec_of(512, 512, **options)
    sizes = range(576 if bias is None else 544, 0, -step)
    for head_dim, value_dim in itertools.product(sizes, sizes):
        if max(head_dim, value_dim) <= 256:
            continue
        spec = dataclasses.replace(plain, head_dim=head_dim, value_dim=value_dim)
        assert mosaic_gpu.unsupported_call(spec) is None
        kernels = [plan.plan_forward(spec, 132), *plan.plan_backward(spec, 132)]
        assert isinstance(kernels[0].plan, WideForwardPlan)
        assert len(kernels) == 4 + (bias is not None)
        for kernel in kernels:
            assert smem.fits(kernel.plan.launch.smem), (head_dim, value_dim, kernel)


@cover(every=6)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("precision", "most", "beside_bias"),
    [(None, 576, 544), ("highest", 384, 352), ("BF16_BF16_F32", 1152, 1120)],
    ids=str,
)
def test_float32_is_served_by_how_many_columns_both_heads_have(
    precision: str | None, most: int, beside_bias: int, has_bias: bool
):
    """In whole tiles: wherever tiles of every kernel fit, which are narrow heads' wherever those fit."""
    bias = dict(bias=jnp.zeros((1, 1, 300, 200), jnp.float32)) if has_bias else {}
    plain = spec_of(8, 8, dtype=jnp.float32, precision=precision, **bias)
    for head_dim, value_dim in itertools.product(range(32, 577, 32), (32, 192, 256, 288, 544)):
        spec = dataclasses.replace(plain, head_dim=head_dim, value_dim=value_dim)
        is_served = head_dim + value_dim <= (beside_bias if has_bias else most)
        assert (mosaic_gpu.unsupported_call(spec) is None) == is_served, (head_dim, value_dim)
        if not is_served:
            continue
        kernels = [plan.plan_forward(spec, 132), *plan.plan_backward(spec, 132)]
        assert isinstance(kernels[0].plan, WideForwardPlan) == isinstance(kernels[1].plan, WidePlan)
        for kernel in kernels:
            assert smem.fits(kernel.plan.launch.smem), (head_dim, value_dim, kernel)


def test_what_is_refused():
    assert "at most 576" in str(mosaic_gpu.unsupported_call(spec_of(577, 64)))
    bias = jnp.zeros((1, 1, 300, 200), jnp.float32)
    assert "shared memory" in str(mosaic_gpu.unsupported_call(spec_of(576, 576, bias=bias)))


def test_the_plan_in_words():
    text = plan.describe(spec_of(576, 512), 132)
    assert "jflash_forward_576_512" in text
    assert text.count("jflash_wide_d_") == 3
    assert "tangent" not in text
    assert "clusters" not in text
    assert "in clusters of 2, 4 warpgroups" in plan.describe(spec_of(576, 512, is_causal=True), 132)
    assert "jflash_tangent_320" in plan.describe(spec_of(320, 320), 132)


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("dim", [32, 64, 256, 288, 320, 512, 576])
def test_chunks_make_every_product_once(dim: int, precision: str | None):
    """Products of pieces go over all columns; a chunk is read from its first product to its last."""
    for dtype in (jnp.bfloat16, jnp.float32):
        divided = ColumnChunks.of(spec_of(8, 8, dtype=dtype, precision=precision), dim)
        assert divided.width % min(64, dim & -dim) == 0
        places = [divmod(first, divided.columns) for first in divided.first_columns]
        made = [(factor, *places[chunk]) for chunk, factor in divided.products]
        columns = range(0, dim, divided.width)
        assert [first for _, first in places] == [*columns] * divided.pieces
        pairs = operand_pieces.order(divided.pieces)
        assert sorted(made) == sorted((factor, piece, first) for factor, piece in pairs for first in columns)
        held: set[int | None] = set()
        most, leaving = 0, None
        for chunk, factor in divided.products:
            # It comes for the product with the smallest piece.
            assert (factor == chunk // divided.of_a_piece) == (chunk not in held)
            held.add(chunk)
            most = max(most, len(held))
            # It leaves when the next product is issued, for which that chunk must be there.
            held.discard(leaving)
            leaving = chunk if factor == 0 else None
        assert held == {leaving}
        assert most == divided.least


def test_three_pieces_are_added_the_smallest_first():
    """Products of larger pieces come later: what is added to them is rounded more."""
    divided = ColumnChunks.of(spec_of(8, 8, dtype=jnp.float32, precision="highest"), 192)
    pieces = [(divided.first_columns[chunk] // 192, factor) for chunk, factor in divided.products]
    assert [piece for piece, _ in itertools.groupby(pieces)] == [(2, 0), (1, 1), (1, 0), (0, 2), (0, 1), (0, 0)]
