"""A call through the kernels: its arrays are prepared, its kernels run, and their results get the call's shapes.

Kernels by `mma.sync` take rows as they are, in pieces, with columns in multiples of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.cta import copies_bias
from jflash._backends.mosaic_gpu_mma.ops import MmaOps
from jflash._backends.nvidia import prepared
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.finish import finish_backward, finish_forward
from jflash._backends.nvidia.launch import Kernel
from jflash._backends.nvidia.merge import merged
from jflash._backends.nvidia.prepared import Prepared, PreparedBackward, in_32_bits
from jflash._backends.nvidia.tile import operand_pieces
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals


class MmaCall(Prepared):
    """What forward and backward kernels read."""

    def in_chunks(self, array: Float[Array, "B L N H"]) -> Float[Array, "B L N columns"]:
        """Return an array in pieces, with H a multiple of 8: copies take 16 bytes at a time."""
        return operand_pieces.split_array(self.spec, jnp.pad(array, [(0, 0)] * 3 + [(0, -array.shape[3] % 8)]))

    @property
    def cache(self) -> dict[str, Array]:
        """Keys and values in pages, as they are, with the table and the scales, by name; nothing without pages."""
        operands = self.operands
        if operands.page_table is None:
            return {}
        names = "key", "value", "page_table", "k_scale", "v_scale"
        found = {name: getattr(operands, name) for name in names}
        return {name: array for name, array in found.items() if array is not None}

    @functools.cached_property
    def others(self) -> dict[str, Array]:
        """The operands but query, key, value and a packed mask. A bias of both axes is padded for copies."""
        has_bias_tiles = facts_of(self.spec).has_bias_tiles
        found = prepared.operands_for_kernels(self.spec, self.operands, except_bias=has_bias_tiles)
        found, bias = found | self.function_arrays, self.operands.bias
        if bias is not None and has_bias_tiles:
            missing = -bias.shape[3] % 8 if copies_bias(self.spec) else 0
            found["bias"] = jnp.pad(bias, [(0, 0)] * 3 + [(0, missing)])
        return found


class MmaBackward(MmaCall, PreparedBackward):
    """What backward kernels read."""

    @functools.cached_property
    def delta(self) -> Float[Array, "B N T"]:
        """delta of every row, by XLA."""
        residuals = self.residuals
        products = residuals.out.astype(jnp.float32) * residuals.d_out.astype(jnp.float32)
        delta = products.sum(axis=-1).transpose(0, 2, 1) - residuals.d_lse
        return jnp.where(residuals.lse == -jnp.inf, 0, delta)

    @functools.cached_property
    def _arrays(self) -> dict[str, Array]:
        return {name: self.in_chunks(array) for name, array in self.factors.items()} | self.others | self.rows

    @property
    def of_queries(self) -> dict[str, Array]:
        """What kernels read whose rows are queries, by name."""
        return self._arrays | self.packed_mask()

    @property
    def of_keys(self) -> dict[str, Array]:
        """What kernels read whose rows are keys, by name."""
        return self._arrays | self.packed_mask(keys_first=True)


@in_32_bits
def forward(
    kernel: Kernel[Any], operands: Operands, ops: MmaOps
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Return the output in the results' dtype and the log-sum-exp in float32."""
    plan = kernel.plan
    call = MmaCall(plan.spec, operands, ops)
    made = merged(plan, call, kernel.run(call))
    return finish_forward(plan, operands, made)


@in_32_bits
def backward(kernels: Sequence[Kernel[Any]], operands: Operands, residuals: Residuals, ops: MmaOps) -> Operands:
    """Return the gradients of all operands that have one, in their shapes."""
    call = MmaBackward(kernels[0].plan.spec, operands, residuals, ops)
    made = call.run(kernels)
    return finish_backward(call.spec, operands, made, sinks_gradient(operands.sinks, call.lse, call.delta))
