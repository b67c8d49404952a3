"""The shader source of one call: the facts of its `Spec` as `#define`s, in front of the shaders with their headers.

One mechanism for every host, and no feature that a call does not use is in its source. Lengths, strides and the values
of numbers are not either: they come with the launch (`_parameters`), so that calls of other sizes share the source.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from jflash._semantics.spec import Spec
from jflash_metal._blocks import Block, blocks
from jflash_metal._parameters import PARAMETERS

SHADERS = Path(__file__).parent / "shaders"
SCALARS = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
"""JAX's names of dtypes and Metal's."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients beside those of query, key and value the backward computes, and by whom."""

    bias_pairs: bool
    """[B, N, T, S], by `d_query`."""
    bias_shared: bool
    """[#B, #N, T, S], by a kernel of its own."""
    bias_rows: bool
    """[B, N, T], by `d_query`, to be summed over what is shared."""
    bias_columns: bool
    """[B, N, S], by `d_key_value`, likewise."""
    slopes: bool
    scale: bool


def wanted(spec: Spec) -> Wanted:
    """What the backward of a call has to give."""
    asked = lambda name: name in spec.operands and name not in spec.constants
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


def forward(spec: Spec, bias: str) -> str:
    """The source with the entry point `forward`; `bias` is its dtype's name in JAX."""
    sinks = {"HAS_SINKS": "sinks" in spec.operands}
    return _assemble("forward.metal", {**_features(spec, bias), **sinks, **_sizes("FORWARD", blocks(spec).forward)})


def backward(spec: Spec, bias: str) -> str:
    """The source with the entry points `delta`, `d_query` and `d_key_value`, and `d_bias` where it is wanted."""
    sizes, want = blocks(spec), wanted(spec)
    results = row_results(want)
    return _assemble(
        "backward.metal",
        {
            **_features(spec, bias),
            **{f"WANT_{name.upper()}": value for name, value in dataclasses.asdict(want).items()},
            **{f"{name.upper()}_BUFFER": 18 + index for index, name in enumerate(results)},
            "D_QUERY_PARAMETERS_BUFFER": 18 + len(results),
            **_sizes("D_QUERY", sizes.d_query),
            **_sizes("D_KEY_VALUE", sizes.d_key_value),
        },
    )


def row_results(want: Wanted) -> list[str]:
    """Names of the results of `d_query` beside dQ, in the order of their buffers."""
    present = {
        "d_bias": want.bias_pairs,
        "d_bias_rows": want.bias_rows,
        "d_slope_rows": want.slopes,
        "d_scale_rows": want.scale,
    }
    return [name for name, asked in present.items() if asked]


def _sizes(kernel: str, block: Block) -> dict[str, int]:
    return {f"{kernel}_{name.upper()}": value for name, value in dataclasses.asdict(block).items()}


def _features(spec: Spec, bias_dtype: str) -> dict[str, Any]:
    left, right = spec.bounds
    bias, mask = spec.bias_shape or (1, 1, 1, 1), spec.mask_shape or (1, 1, 1, 1)
    return dict(
        PARAMETERS_SIZE=PARAMETERS.itemsize,
        SCALAR=SCALARS[spec.dtype.name],
        HEAD_DIM=spec.head_dim,
        VALUE_DIM=spec.value_dim,
        BIAS_SCALAR=SCALARS[bias_dtype],
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
    )


def _assemble(name: str, definitions: dict[str, Any]) -> str:
    lines = [f"#define {key} {int(value) if isinstance(value, bool) else value}" for key, value in definitions.items()]
    return "\n".join([*lines, _inlined(name, set())])


def _inlined(name: str, seen: set[str]) -> str:
    """A shader with each of its own headers in the place of its first `#include`."""
    if name in seen:
        return ""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((SHADERS / name).read_text().splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included is not None:
            lines += [_inlined(included[1], seen), f'#line {number + 1} "{name}"']
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)
