"""The backend for Apple GPUs: Metal shaders, run as XLA custom calls on JAX's cpu platform.

Apple's GPUs share their memory with the CPU, so the arrays of JAX's CPU platform are read and written in place. On
jax-graft's platform `mtl`, whose custom calls are not told of the work before them, the same kernels run in a host
callback (`_launch`). Where the native library is built without Metal (`_ffi.host()`), the same shaders run in an
emulator: slowly, and watched for races and for accesses out of bounds.

A call is planned from its `Spec` (`_plan`), its arrays are prepared and its kernels launched (`_launch`, by way of
`_ffi`), and `finish` makes the gradients from what the kernels wrote. shaders/ has the algorithms. A mask function
comes to the shaders as lists of tiles and as bits (`_tile_lists`), if need be in parts of the call (`_parts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._platform import Platform
from jflash._semantics import visits
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash_metal import _ffi, _parts
from jflash_metal._launch import BY_CALLBACK, launch, prepare
from jflash_metal._plan import CACHE_SCALARS, SCALARS, copies, plan_backward, plan_forward

__all__ = ["ONLY_BY_NAME", "backward", "describe", "forward", "program", "unsupported", "visits_lists"]

ONLY_BY_NAME = True
"""Until the shaders have run on an Apple GPU, `implementation=None` does not choose them."""
LARGEST_DIM = 256


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Return why a call is refused, else `None`: another platform than JAX's cpu, an option that the shaders do not
    compute, or a native library that is not there."""
    if platform.name == "METAL":
        return (
            "jax-metal's platform METAL runs two custom calls of its own and has no FFI, so no library can run a "
            "shader there. On the same Mac JAX's cpu platform can (JAX_PLATFORMS=cpu), and jax-graft's mtl."
        )
    if platform.name == "mps":
        return (
            "jax-mps's platform mps has no FFI, so no library can run a shader there. On the same Mac JAX's cpu "
            "platform can (JAX_PLATFORMS=cpu), and jax-graft's mtl."
        )
    if platform.name not in ("cpu", *BY_CALLBACK):
        return f"its kernels are for Apple GPUs, by way of JAX's cpu platform or jax-graft's mtl; this is {platform}."
    if spec.dtype.name not in SCALARS:
        return f"Metal has no {spec.dtype}; it takes {', '.join(SCALARS)}."
    if spec.pages is not None and spec.pages.dtype.name not in CACHE_SCALARS:
        return f"Metal has no {spec.pages.dtype}; a paged cache may have the query's dtype or int8."
    if max(spec.head_dim, spec.value_dim) > LARGEST_DIM:
        return f"head dimensions up to {LARGEST_DIM}; these are {spec.head_dim} and {spec.value_dim}."
    if spec.dropout_rate > 0:
        return "it has no dropout."
    if spec.score_mod is not None:
        return "it has no score_mod: a Python function cannot become part of a Metal shader."
    return _ffi.available()


def visits_lists(spec: Spec, platform: Platform) -> bool:
    """Whether blocks have lists of the tiles that they visit, so that a map of them is of use."""
    del platform
    return visits.has_gaps(spec)


def program(platform: Platform) -> str:
    """Return the platform's name: there are custom calls on the cpu platform, and host callbacks on `mtl`."""
    return platform.name


def describe(spec: Spec, platform: Platform) -> str:
    """Return what a call launches, as text: for each kernel the grid, the block, threadgroup memory and results."""
    del platform  # the plan is the same wherever the shaders run
    copied = "; ".join(copies(spec)) or "nothing"
    backward = "" if spec.pages is not None else f"backward\n{plan_backward(spec)}\n"
    return f"forward\n{plan_forward(spec)}\n{backward}prepared by copying: {copied}"


def forward(spec: Spec, operands: Operands) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in float32."""
    return _parts.forward(_forward, spec, operands)


def _forward(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    plan = plan_forward(spec)
    results = launch(plan, prepare(spec, plan, operands))
    return results["out"], results["lse"]


def backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    """Return the gradients of the operands, `None` for those that have none or are not differentiated."""
    return _parts.backward(_backward, spec, operands, residuals)


def _backward(spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
    plan = plan_backward(spec)
    results = launch(plan, prepare(spec, plan, operands, residuals))
    return finish(spec, operands, residuals, results)


def finish(spec: Spec, operands: Operands, residuals: Residuals, results: Mapping[str, Array]) -> Operands:
    """Return the gradients from what the kernels of the backward wrote."""
    gradients: dict[str, Any] = {name: results.get(f"d_{name}") for name in ("query", "key", "value")}
    bias = operands.bias
    if bias is not None:
        dtype = spec.gradient_dtype(bias.dtype)
        if "d_bias" in results:
            gradients["bias"] = results["d_bias"].astype(dtype)
        elif "d_bias_rows" in results:
            gradients["bias"] = _summed(results["d_bias_rows"][..., None], bias.shape).astype(dtype)
        elif "d_bias_columns" in results:
            gradients["bias"] = _summed(results["d_bias_columns"][:, :, None], bias.shape).astype(dtype)
    if operands.scale is not None and "d_scale_rows" in results:
        gradients["scale"] = _summed(results["d_scale_rows"], operands.scale.shape)
    if operands.alibi_slopes is not None and "d_slope_rows" in results:
        gradients["alibi_slopes"] = _summed(results["d_slope_rows"], operands.alibi_slopes.shape)
    seen_lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
    return Operands(**gradients, sinks=sinks_gradient(operands.sinks, seen_lse, results["delta"]))


def _summed(array: Array, shape: tuple[int, ...]) -> Array:
    """Return `array` summed over the axes that have size 1 in `shape`, or that it does not have."""
    array = array.sum(axis=tuple(range(len(shape), array.ndim)))
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return array.sum(axis=shared, keepdims=True)
