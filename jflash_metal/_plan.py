"""The plan of a call, from its `Spec` alone: kernels, their blocks, grids and buffers, the shader's `#define`s."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jflash._semantics import visibility, visits
from jflash._semantics.coverage import TILE
from jflash._semantics.spec import Spec
from jflash_metal import _source
from jflash_metal._blocks import THREADS, Block, Blocks, Memory, blocks_of
from jflash_metal._parameters import PARAMETERS, parameters_of

SCALARS = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
"""The names of dtypes in JAX and in Metal."""
CACHE_SCALARS = SCALARS | {"int8": "char"}
"""The same for the dtypes of a paged cache."""
OPERANDS = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "scale",
    "alibi_slopes",
    "query_offset",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
    "query_segment_ranges",
    "key_segment_ranges",
    "key_tiles",
    "query_tiles",
    "tile_masks",
    "page_table",
    "k_scale",
    "v_scale",
)
"""The first buffers of every kernel of attention, `FOR_EACH_OPERAND` of shaders/operands.h."""
RESIDUALS = ("d_out", "lse", "delta")
"""The buffers that follow the operands in the kernels of the backward."""


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that a kernel writes, every byte of it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch. Its buffers are `operands`, `results` and the parameters, in this order."""

    entry: str
    grid: tuple[int, int, int]
    """The threadgroups along x, y, z."""
    operands: tuple[str, ...]
    results: tuple[Result, ...]
    block: Block | None = None
    memory: tuple[tuple[str, int], ...] = ()
    """The bytes of each threadgroup variable."""

    @property
    def threadgroup_memory(self) -> int:
        """The bytes that a threadgroup holds."""
        return sum(size for _, size in self.memory)

    def __str__(self) -> str:
        size = "x".join(map(str, self.grid))
        lines = [f"kernel {self.entry}: {size} threadgroups of {THREADS} threads"]
        if self.block is not None:
            held = "both tiles of a step held at once" if self.block.streams == 2 else "the tiles of a step take turns"
            lines.append(f"block: {self.block.rows} rows stay, {self.block.columns} stream by, {held}")
            variables = ", ".join(f"{name} {size:,}" for name, size in self.memory)
            lines.append(f"threadgroup memory: {self.threadgroup_memory:,} bytes ({variables})")
        return "\n  ".join([*lines, f"writes: {', '.join(map(str, self.results))}"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels of a forward or a backward, in the order in which they run; later ones read earlier ones' results."""

    shader: str
    definitions: tuple[tuple[str, str | int], ...]
    parameters: bytes
    """The structure `Parameters` of shaders/parameters.h, without what only the operands know."""
    kernels: tuple[Kernel, ...]

    def source(self) -> str:
        """The shader's text."""
        return _source.assemble(self.shader, self.definitions)

    def __str__(self) -> str:
        features = [name for name, value in self.definitions if value is True]
        return "\n".join([*map(str, self.kernels), f"features: {', '.join(features) or 'none'}"])


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The gradients, beside those of query, key and value, that the backward computes."""

    bias_pairs: bool
    """Whether `d_query` writes the gradient of a bias [B, N, T, S]."""
    bias_shared: bool
    """Whether `d_bias` writes the gradient of a bias [#B, #N, T, S]."""
    bias_rows: bool
    """Whether `d_query` writes a gradient of the bias [B, N, T], which is summed over shared axes afterwards."""
    bias_columns: bool
    """Whether `d_key_value` writes a gradient of the bias [B, N, S], which is summed over shared axes afterwards."""
    slopes: bool
    scale: bool


@functools.lru_cache(maxsize=256)
def plan_forward(spec: Spec) -> Plan:
    """Return the plan of a forward, which writes `out` and `lse`."""
    sizes = _blocks(spec)
    kernel = Kernel(
        "forward",
        (_count(spec.query_length, sizes.forward.rows), spec.heads, spec.batch),
        (*OPERANDS, "sinks"),
        (
            Result("out", (spec.batch, spec.query_length, spec.heads, spec.value_dim), spec.result_dtype),
            _by_row(spec, "lse"),
        ),
        sizes.forward,
        tuple(_memory(spec).forward(sizes.forward).items()),
    )
    definitions = {**_features(spec), "HAS_SINKS": "sinks" in spec.operands, **_sizes("FORWARD", sizes.forward)}
    return Plan("forward.metal", tuple(definitions.items()), parameters_of(spec), (kernel,))


@functools.lru_cache(maxsize=256)
def plan_backward(spec: Spec) -> Plan:
    """Return the plan of a backward, which writes `delta` and the gradients that are asked for."""
    sizes, want, memory = _blocks(spec), _wanted(spec), _memory(spec)
    operands = (*OPERANDS, *RESIDUALS)
    query_blocks = _count(spec.query_length, sizes.d_query.rows)
    key_blocks = lambda rows: _count(spec.key_length, rows)
    query_shape = (spec.batch, spec.query_length, spec.heads, spec.head_dim)
    key_shape = (spec.batch, spec.key_length, spec.key_heads)
    bias_shape = spec.bias_shape or (1, 1, 1, 1)
    d_bias = Result("d_bias", bias_shape, _d_bias_dtype(spec))
    row_results = [
        *([d_bias] if want.bias_pairs else []),
        *(
            _by_row(spec, name)
            for name, is_wanted in (
                ("d_bias_rows", want.bias_rows),
                ("d_slope_rows", want.slopes),
                ("d_scale_rows", want.scale),
            )
            if is_wanted
        ),
    ]
    columns = Result("d_bias_columns", (spec.batch, spec.heads, spec.key_length), np.dtype(np.float32))
    d_query = Kernel(
        "d_query",
        (query_blocks, spec.heads, spec.batch),
        operands,
        (Result("d_query", query_shape, spec.result_dtype), *row_results),
        sizes.d_query,
        tuple(memory.d_query(sizes.d_query).items()),
    )
    d_key_value = Kernel(
        "d_key_value",
        (key_blocks(sizes.d_key_value.rows), spec.key_heads, spec.batch),
        operands,
        (
            Result("d_key", (*key_shape, spec.head_dim), spec.result_dtype),
            Result("d_value", (*key_shape, spec.value_dim), spec.result_dtype),
            *([columns] if want.bias_columns else []),
        ),
        sizes.d_key_value,
        tuple(memory.d_key_value(sizes.d_key_value).items()),
    )
    kernels = [
        Kernel(
            "delta",
            (_count(spec.query_length, 4), spec.heads, spec.batch),
            ("out", "d_out", "lse", "d_lse"),
            (_by_row(spec, "delta"),),
        )
    ]
    if "query" not in spec.undifferentiated or row_results:
        kernels.append(d_query)
    if not {"key", "value"} <= spec.undifferentiated or want.bias_columns:
        kernels.append(d_key_value)
    if want.bias_shared:
        grid = (key_blocks(sizes.d_query.columns), query_blocks, bias_shape[0] * bias_shape[1])
        bias_memory = tuple(memory.d_bias(sizes.d_query).items())
        kernels.append(Kernel("d_bias", grid, operands, (d_bias,), sizes.d_query, bias_memory))
    buffers = {
        f"{result.name.upper()}_BUFFER": len(operands) + 1 + index for index, result in enumerate(row_results)
    } | {
        f"{kernel.entry.upper()}_PARAMETERS_BUFFER": len(kernel.operands) + len(kernel.results)
        for kernel in (d_query, d_key_value)
    }
    definitions = {
        **_features(spec),
        "HIDDEN_ROWS_HAVE_COTANGENTS": visibility.hidden_rows_have_cotangents(spec),
        **{f"WANT_{name.upper()}": value for name, value in dataclasses.asdict(want).items()},
        **buffers,
        **_sizes("D_QUERY", sizes.d_query),
        **_sizes("D_KEY_VALUE", sizes.d_key_value),
    }
    return Plan("backward.metal", tuple(definitions.items()), parameters_of(spec), tuple(kernels))


def copies(spec: Spec) -> list[str]:
    """Return in words what a launch copies or computes before the kernels run."""
    return [
        words
        for present, words in (
            ("query_segments" in spec.operands, "the smallest and the largest segment of every 8 queries and keys"),
            (visits.has_gaps(spec), f"lists of the tiles of {TILE} x {TILE} that show something"),
            (
                spec.mask_mod is not None,
                "a bit of the mask function for each pair of those that are seen in part, up to 32 MiB at a time",
            ),
        )
        if present
    ]


def _wanted(spec: Spec) -> Wanted:
    asked = lambda name: name in spec.operands and name not in spec.undifferentiated
    batch, heads, queries, keys = spec.bias_shape or (1, 1, 1, 1)
    bias, of_pairs = asked("bias"), queries > 1 and keys > 1
    shared = (batch, heads) != (spec.batch, spec.heads)
    return Wanted(
        bias_pairs=bias and of_pairs and not shared,
        bias_shared=bias and of_pairs and shared,
        bias_rows=bias and keys == 1,
        bias_columns=bias and keys > 1 and queries == 1,
        slopes=asked("alibi_slopes"),
        scale=asked("scale"),
    )


def _features(spec: Spec) -> dict[str, str | int]:
    left, right = spec.bounds
    bias, mask = spec.bias_shape or (1, 1, 1, 1), spec.mask_shape or (1, 1, 1, 1)
    return dict(
        PARAMETERS_SIZE=PARAMETERS.itemsize,
        SCALAR=SCALARS[spec.dtype.name],
        RESULT_SCALAR=SCALARS[spec.result_dtype.name],
        HEAD_DIM=spec.head_dim,
        VALUE_DIM=spec.value_dim,
        BIAS_SCALAR=SCALARS[_bias_dtype(spec).name],
        D_BIAS_SCALAR=SCALARS[_d_bias_dtype(spec).name],
        HAS_BIAS="bias" in spec.operands,
        BIAS_BY_QUERY=bias[2] > 1,
        BIAS_BY_KEY=bias[3] > 1,
        HAS_MASK="mask" in spec.operands,
        MASK_BY_QUERY=mask[2] > 1,
        MASK_BY_KEY=mask[3] > 1,
        SCALE_IS_ARRAY="scale" in spec.operands,
        HAS_SOFT_CAP=spec.logits_soft_cap is not None,
        HAS_ALIBI="alibi_slopes" in spec.operands,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        OFFSET_IS_ARRAY="query_offset" in spec.operands,
        HAS_QUERY_LENGTHS="query_lengths" in spec.operands,
        HAS_KEY_LENGTHS="key_lengths" in spec.operands,
        HAS_SEGMENTS="query_segments" in spec.operands,
        HAS_LISTS=visits.has_gaps(spec),
        HAS_MASK_MOD=spec.mask_mod is not None,
        LISTED_TILE=TILE,
        CACHE_SCALAR=CACHE_SCALARS[(spec.pages or spec).dtype.name],
        HAS_PAGES=spec.pages is not None,
        PAGE_SIZE=1 if spec.pages is None else spec.pages.size,
        PAGES_INTERLEAVED=spec.pages is not None and spec.pages.interleaved,
        HAS_K_SCALE="k_scale" in spec.operands,
        HAS_V_SCALE="v_scale" in spec.operands,
    )


def _bias_dtype(spec: Spec) -> np.dtype[Any]:
    """Return the dtype of the bias; any dtype, if the call has none."""
    return np.dtype(np.float32) if spec.bias_dtype is None else spec.bias_dtype


def _d_bias_dtype(spec: Spec) -> np.dtype[Any]:
    """Return the kernels' dtype of the bias's gradient."""
    return spec.gradient_dtype(_bias_dtype(spec))


def _blocks(spec: Spec) -> Blocks:
    return blocks_of(spec.dtype.itemsize, spec.head_dim, spec.value_dim)


def _memory(spec: Spec) -> Memory:
    return Memory(spec.dtype.itemsize, spec.head_dim, spec.value_dim)


def _sizes(kernel: str, block: Block) -> dict[str, int]:
    return {f"{kernel}_{name.upper()}": value for name, value in dataclasses.asdict(block).items()}


def _by_row(spec: Spec, name: str) -> Result:
    return Result(name, (spec.batch, spec.heads, spec.query_length), np.dtype(np.float32))


def _count(length: int, block: int) -> int:
    return -(-length // block)
