"""Runs calls through the kernels by `mma.sync` as they are compiled for a GPU, without one: their PTX, in an emulator.

    python mma_emulate.py DIRECTORY COMPUTE_CAPABILITY CASE...

A case is those fields of `Case` that are not its own, as JSON, and if it has them "deterministic" and "precision", of
float32; with "pages", what `paged.paginate` takes, it is the forward with a paged cache, and with "mask_mod" the name
of one of `kernel_masks`. Prints what is wrong with each, "" for nothing, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
os.environ["JAX_PLATFORMS"] = "cpu"

import cases
import jax
import jax.numpy as jnp
import kernel_masks
import numpy as np
import oracle
import paged
import ptx_emulator
from cases import Case
from hopper_kernels import canonical, residuals, shaped_as
from kernel_families import mma
from mma_compile import DIRECTORY, Device, on_device, sharding

from jflash._backends.mosaic_gpu_mma import plan
from jflash._backends.mosaic_gpu_mma.cta import MmaOps
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.launch import Launch, Refs
from jflash._platform import Platform

CAPABILITY = sys.argv[2]
_launched = Launch.run


def updated(
    self: Launch,
    body: Callable[[Refs], None],
    arrays: Mapping[str, Any],
    states: Mapping[str, Any],
    ops: MmaOps,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A kernel's results, and what it made of its states, in the place of `Launch.update`."""
    made = emulated(self, body, {**arrays, **states}, ops, tuple(states))
    return {name: made[name] for name in self.results}, {name: made[name] for name in states}


def emulated(
    self: Launch,
    body: Callable[[Refs], None],
    arrays: Mapping[str, Any],
    ops: MmaOps,
    changed: Sequence[str] = (),
) -> dict[str, Any]:
    """A kernel's results, and the arrays that it changed, in the place of `Launch.run`."""
    if not self.results:
        # XLA drops a kernel that returns nothing.
        self = dataclasses.replace(self, results=dict(unused=jax.ShapeDtypeStruct((1,), jnp.int32)))
    for path in DIRECTORY.iterdir():
        path.unlink()
    names = list(arrays)
    placed = sharding(CAPABILITY)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed) for array in arrays.values()]
    run = lambda *given: _launched(self, body, dict(zip(names, given, strict=True)), ops)
    with on_device(CAPABILITY):
        lowered = jax.jit(run, keep_unused=True).lower(*shapes)
    lowered.compile()
    (ptx,), (passes,) = (list(DIRECTORY.glob(f"*.{kind}")) for kind in ("ptx", "mlir-passes.log"))
    buffers = _buffers(lowered.as_text(), names, sorted(self.results))
    order = [buffers[index] for index in _parameters(passes.read_text())]
    given = {name: np.asarray(array) for name, array in arrays.items()}
    size = max(smem.size(self.smem), 1)
    options = dict(warpgroups=self.warpgroups or 1, changed=changed)
    made = ptx_emulator.run(ptx.read_text(), list(self.grid.values()), given, self.results, order, size, **options)
    return {name: jnp.asarray(array) for name, array in made.items()}


def _buffers(program: str, arrays: list[str], results: list[str]) -> list[str]:
    """The names of what XLA gives a kernel, in order: of arrays, and of results, which the program returns by name."""
    call = re.search(r"custom_call @mosaic_gpu_v2\((.*?)\)", program)
    operands = [arrays[int(argument)] for argument in re.findall(r"%arg(\d+)", call[1])]
    returned = re.search(r"^\s*return (.*?) :", program, re.MULTILINE)[1].split(",")
    places = [int(value.partition("#")[2] or 0) for value in returned]
    return operands + [name for _, name in sorted(zip(places, results, strict=True))]


def _parameters(passes: str) -> list[int]:
    """Return, for each parameter of the PTX, which of the host program's arguments the kernel is launched with."""
    before, _, after = passes.rpartition("gpu.launch_func")
    host = before[before.rindex("func.func") :]
    loads = dict(re.findall(r"(%\w+) = llvm\.load (%\w+)", host))
    places = {name: int(at) for name, at in re.findall(r"(%\w+) = llvm\.getelementptr %\w+\[(\d+)\]", host)}
    arguments = re.search(r"args\((.*?)\)", after)[1]
    # The first one's place is the array of pointers' own.
    return [places.get(loads[name], 0) for name in re.findall(r"(%\w+) :", arguments)]


def wrong(case: Case, mask_mod: str | None = None, **options: Any) -> str:
    """What is wrong with a call's results, with both directions emulated."""
    call = cases.build(case) if mask_mod is None else kernel_masks.call_of(kernel_masks.MASKS[mask_mod], case)
    spec, operands = canonical(call, **options)
    family = mma(CAPABILITY)
    forward, backward = family.plans(spec, Device.num_cores)
    out, lse = family.call.forward(forward, operands, family.ops)
    gradients = family.call.backward(backward, operands, residuals(call, spec, out, lse), family.ops)
    smooth, _, _ = oracle.split(call)
    results = oracle.Results(
        out.reshape(*case.batch, *out.shape[1:]),
        lse.transpose(0, 2, 1).reshape(call.d_lse.shape),
        {name: shaped_as(getattr(gradients, name), array) for name, array in smooth.items()},
    )
    try:
        oracle.assert_right(results, call, as_tf32=case.dtype == "float32" and "precision" not in options)
    except AssertionError as error:
        return str(error)
    return ""


def wrong_of_pages(
    case: Case,
    *,
    page_size: int,
    dtype: str | None = None,
    interleaved: bool = False,
    scaled_by_page: bool = True,
    **options: Any,
) -> str:
    """What is wrong with the forward of a call with a paged cache, which has scales if it has a dtype of its own."""
    call = paged.with_lengths(cases.build(case))
    scaled = dtype is not None
    call = paged.of_8_bits(call, dtype) if scaled and dtype != case.dtype else call
    arguments = paged.paginate(call, page_size, dtype=dtype, interleaved=interleaved)
    if scaled:
        pages, heads = arguments["key"].shape[0], call.key.shape[-2]
        by_page = 0.05 + np.arange(pages * heads, dtype=np.float32).reshape(pages, heads) / 128
        arguments |= dict(k_scale=by_page if scaled_by_page else 0.05, v_scale=0.3)
    spec, operands = canonical(call, **arguments, **options)
    family = mma(CAPABILITY)
    kernel = plan.plan_forward(spec, Platform("gpu", "some GPU", CAPABILITY, Device.num_cores))
    out, lse = family.call.forward(kernel, operands, family.ops)
    shape = call.query.shape[:-1]
    results = oracle.Results(out.reshape(*shape, out.shape[-1]), lse.transpose(0, 2, 1).reshape(shape), {})
    try:
        as_tf32 = case.dtype == "float32" and "precision" not in options
        if scaled:
            paged.assert_scaled_right(results, call, arguments, as_tf32=as_tf32)
        else:
            oracle.assert_right(results, call, as_tf32=as_tf32)
    except AssertionError as error:
        return str(error)
    return ""


def main(rows: list[str]) -> None:
    """Every case."""
    Launch.run, Launch.update = emulated, updated
    as_tuples = lambda row: {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    found: list[str] = []
    for row in map(json.loads, rows):
        options = {name: row.pop(name) for name in ("deterministic", "precision", "mask_mod") if name in row}
        pages = row.pop("pages", None)
        case = Case(**as_tuples(row))
        found.append(wrong(case, **options) if pages is None else wrong_of_pages(case, **pages, **options))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[3:])
