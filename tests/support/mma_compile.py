"""Compiles the kernels by `mma.sync` for several GPUs on a machine without one, and prints what ptxas says, as JSON.

    python mma_compile.py DIRECTORY COMPUTE_CAPABILITY [CASE...]

The report of a kernel is found under its case's name and its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
os.environ["JAX_PLATFORMS"] = "cpu"

import h200
import jax
import jax.numpy as jnp
from hopper_compile import (
    CASES,
    DIRECTORY,
    FLOAT32,
    LENGTH,
    PAIRS,
    PARTIAL,
    bfloat16,
    float32,
    with_functions,
)
from hopper_kernels import canonical_arguments
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from kernel_families import mma

from jflash._backends.mosaic_gpu_mma import plan
from jflash._backends.mosaic_gpu_mma.backward_fused import FusedPlan
from jflash._platform import Platform
from jflash._semantics.spec import Residuals

LARGEST_FLOAT32 = {
    "float32 d192 causal, bias": (192, 192, dict(is_causal=True), dict(bias=(PAIRS, float32))),
    "float32 d128, highest, bias": (128, 128, dict(precision="highest"), dict(bias=(PAIRS, float32))),
    "float32 d192/64, highest": (192, 64, dict(precision="highest"), {}),
    "float32 d96/112, highest, bias": (96, 112, dict(precision="highest"), dict(bias=(PAIRS, float32))),
    **{
        f"float32 d128{name}, score_mod of a table": (128, 128, options, dict(numbers=((4, 256), float32)))
        for name, options in (("", {}), (", highest", dict(precision="highest")))
    },
}
"""Heads as wide as some GPUs serve, which have tiles of their own."""
PAGED = {
    "pages, mask_mod": dict(query_length=LENGTH, mask_mod=lambda b, h, q, k: (k <= q) | (k // 96 == q // 96)),
    "pages of float8": dict(query_length=1, cached=jnp.float8_e4m3fn, scaled=True),
    "pages of int8, 32 rows": dict(query_length=8, cached=jnp.int8, scaled=True),
}
"""Calls with a paged cache."""
CHOSEN = (
    *("d8", "d40", "d64", "d64 causal", "d128", "d128 causal", "d256", "d256 causal", "d192/128 causal", "window"),
    *("soft cap", "bias", "mask", "lengths", "alibi and scale", "d128 causal, dropout", "d256 causal, dropout"),
    *("d128 mask_mod", "score_mod of a bias of keys", "bias, partial", *FLOAT32, *LARGEST_FLOAT32),
    *("score_mod of a number for each head", *(f"d{d} causal, score_mod of a table" for d in (64, 128, 256))),
    *("bias, score_mod of a table", *PAGED),
)
"""Cases that are compiled if none are named."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What Mosaic GPU asks a mesh's device, of which JAX's own lacks the first."""

    compute_capability: str
    device_kind: str = "some GPU"
    num_cores: int = 108
    platform: str = "gpu"

    def _repr(self) -> str:
        return self.device_kind


def main(capability: str, names: list[str]) -> None:
    """Forward and backward of every case."""
    reports: dict[str, dict] = {}
    for name in names or CHOSEN:
        reports |= {f"{name}: {kernel}": report for kernel, report in compiled(name, capability).items()}
    print(json.dumps(reports))


def on_device(capability: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, Mosaic GPU lowers for a compute capability."""
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=Device(capability))
    return jax.sharding.use_abstract_mesh(mesh)


def sharding(capability: str) -> NamedSharding:
    """One GPU: an H200 with another compute capability."""
    major, minor = capability.split(".")
    accelerated = " feature_extension: ACCELERATED_FEATURES"
    own = f"major: {major} minor: {minor}{accelerated if int(major) >= 9 else ''} }}"
    return h200.over(1, PartitionSpec(), h200.CONFIG.replace(f"major: 9{accelerated} }}", own))


def compiled(name: str, capability: str) -> dict[str, dict]:
    """What ptxas says of each kernel of a case."""
    for path in DIRECTORY.iterdir():
        path.unlink()
    with on_device(capability):
        lowered = _lowered_pages(capability, **PAGED[name]) if name in PAGED else _lowered(name, capability)
    lowered.compile()
    return {found[0]: found[1] for found in map(_report, sorted(DIRECTORY.glob("*.ptxas")))}


def _lowered_pages(
    capability: str, *, query_length: int, cached: Any = bfloat16, scaled: bool = False, **options: Any
) -> Any:
    """The forward of eight query heads on two of 128, in pages of 16."""
    family, placed = mma(capability), sharding(capability)
    array = lambda *shape, dtype=bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
    cache, scale = array(200, 16, 2, 128, dtype=cached), array(200, 2, dtype=float32)
    arrays = dict(query=array(2, query_length, 8, 128), key=cache, value=cache)
    arrays |= dict(page_table=array(2, 70, dtype=jnp.int32), key_value_seq_lengths=array(2, dtype=jnp.int32))
    arrays |= dict(k_scale=scale, v_scale=scale) if scaled else {}

    def forward(**arrays: Any) -> Any:
        spec, operands = canonical_arguments(**arrays, **options)
        platform = Platform("gpu", Device.device_kind, capability, Device.num_cores)
        return family.call.forward(plan.plan_forward(spec, platform), operands, family.ops)

    return jax.jit(forward).lower(**arrays)


def _lowered(name: str, capability: str) -> Any:
    """Forward and backward of a case."""
    head_dim, value_dim, options, arrays = (CASES | LARGEST_FLOAT32)[name]
    family, placed = mma(capability), sharding(capability)
    own_dtype = float32 if name in (*FLOAT32, *LARGEST_FLOAT32) else bfloat16
    array = lambda shape, dtype=own_dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def both(query, key, value, d_out, d_lse, arrays):
        spec, operands = canonical_arguments(query=query, key=key, value=value, **options, **with_functions(**arrays))
        spec = dataclasses.replace(spec, partial=name in PARTIAL)
        platform = Platform("gpu", Device.device_kind, capability, Device.num_cores)
        if family.backend.unsupported(spec, platform) is not None:
            # Wider heads are Hopper's alone, or have no room in this GPU's shared memory.
            return ()
        forward, backward = family.plans(spec, Device.num_cores)
        plans = [backward]
        if any(isinstance(kernel.plan, FusedPlan) for kernel in backward):
            # The kernels of which every CTA owns what it sums, too.
            plans += family.plans(dataclasses.replace(spec, deterministic=True), Device.num_cores)[1:]
        out, lse = family.call.forward(forward, operands, family.ops)
        residuals = Residuals(out.astype(spec.dtype), lse, d_out, d_lse)
        return out, [family.call.backward(plan, operands, residuals, family.ops) for plan in plans]

    return jax.jit(both).lower(
        *(array((2, LENGTH, 4, dim)) for dim in (head_dim, head_dim, value_dim, value_dim)),
        array((2, 4, LENGTH), float32),
        {argument: array(*type_) for argument, type_ in arrays.items()},
    )


def _report(path: Path) -> tuple[str, dict]:
    kernel, text = re.match(r"jflash_([a-z_]+?)_\d", path.name)[1], path.read_text()
    read = lambda pattern: max(map(int, re.findall(pattern, text)), default=0)
    target = re.findall(r"for '(sm_\w+)'", text)
    return kernel, dict(
        spills=read(r"(\d+) bytes spill stores"), registers=read(r"Used (\d+) registers"), target=target[0]
    )


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3:])
