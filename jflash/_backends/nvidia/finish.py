"""A call through its kernels: they run, and what they made gets the shapes and dtypes of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.merge import merged
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.packing import ForwardShape
from jflash._backends.nvidia.prepared import Prepared, PreparedBackward, in_32_bits
from jflash._backends.nvidia.tile import score_mod_reads
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec
from jflash._semantics.tile import PARAMETERS


@in_32_bits
def forward(
    kind: type[Prepared], kernel: Kernel[Any], operands: Operands, ops: Ops
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return output in the results' dtype and log-sum-exp in float32, by a kernel that reads a call of this kind."""
    plan = kernel.plan
    call = kind(plan.spec, operands, ops)
    return finish_forward(plan, merged(plan, call, kernel.run(call)))


@in_32_bits
def backward(
    kind: type[PreparedBackward], kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: Ops
) -> Operands:
    """Return the gradients of all operands that have one, in their shapes, by kernels that read a call of this kind."""
    call = kind(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))


def finish_forward(shape: ForwardShape, made: dict[str, Array]) -> tuple[Array, Array]:
    """Return output and log-sum-exp in the call's shapes, from those of packed heads."""
    out = made["out"][:, : shape.out_rows[1], :, : shape.spec.value_dim]
    lse = made["lse"][..., : shape.rows]
    if shape.packed_heads > 1:
        by_head = lse.reshape(*lse.shape[:2], -1, shape.packed_heads).swapaxes(2, 3)
        lse = by_head.reshape(lse.shape[0], shape.spec.heads, -1)
    return out.astype(shape.spec.result_dtype), lse


def finish_backward(spec: Spec, operands: Operands, gradients: dict[str, Array], d_sinks: Array | None) -> Operands:
    """Return gradients in the shapes and dtypes of the operands, from what kernels made."""

    def trimmed(name: str) -> Array:
        like = getattr(operands, name)
        return gradients[f"d_{name}"][:, : like.shape[1], :, : like.shape[3]].astype(spec.result_dtype)

    def summed(name: str) -> Array | None:
        total = gradients.get(f"d_{name}")
        return None if total is None else _to_parameter(spec, name, total, getattr(operands, name))

    parameters: dict[str, Any] = {name: summed(name) for name in PARAMETERS}
    if "whole_d_bias" in gradients:
        parameters["bias"] = gradients["whole_d_bias"]
    return Operands(
        query=trimmed("query"),
        key=trimmed("key"),
        value=trimmed("value"),
        **parameters,
        sinks=d_sinks,
        score_mod_arrays=score_mod_reads.gradients(spec, operands, gradients),
    )


def _to_parameter(spec: Spec, name: str, total: Array, like: Array) -> Array:
    """Return a parameter's gradient from what kernels summed, `[B, N, L]`."""
    kind = facts_of(spec).bias_kind if name == "bias" else "scalar"
    if kind == "row":
        total = total[:, :, : like.shape[2], None]
    elif kind == "column":
        total = total[:, :, None, : like.shape[3]]
    else:
        total = total.sum(axis=(1, 2) if like.ndim == 1 else 2)
        total = total.reshape(*total.shape, *[1] * (like.ndim - total.ndim))
    shared = tuple(axis for axis, size in enumerate(like.shape) if size == 1 and total.shape[axis] > 1)
    return total.sum(axis=shared, keepdims=True).astype(spec.gradient_dtype(like.dtype))
