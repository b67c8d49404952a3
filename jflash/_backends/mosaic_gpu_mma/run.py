"""A call through the kernels: its arrays are prepared, its kernels run, and their results get the call's shapes.

Kernels by `mma.sync` take rows as they are, in pieces, with columns in multiples of 8.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.cta import copies_bias
from jflash._backends.nvidia import finish, prepared
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.prepared import Prepared, PreparedBackward
from jflash._backends.nvidia.tile import operand_pieces


class MmaCall(Prepared):
    """What forward and backward kernels read."""

    def in_chunks(self, array: Float[Array, "B L N H"]) -> Float[Array, "B L N columns"]:
        """Return an array in pieces, with H a multiple of 8: copies take 16 bytes at a time."""
        return operand_pieces.split_array(self.spec, jnp.pad(array, [(0, 0)] * 3 + [(0, -array.shape[3] % 8)]))

    @property
    def cache(self) -> dict[str, Array]:
        """Keys and values in pages, as they are, by name; nothing without pages."""
        return {} if self.spec.pages is None else dict(key=self.operands.key, value=self.operands.value)

    @functools.cached_property
    def others(self) -> dict[str, Array]:
        """The operands but query, key, value and a packed mask. A bias of both axes is padded for copies."""
        has_bias_tiles = facts_of(self.spec).has_bias_tiles
        found = prepared.operands_for_kernels(self.spec, self.operands, except_bias=has_bias_tiles)
        bias = self.operands.bias
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

    def read(self, *, keys_first: bool = False) -> dict[str, Array]:
        """Return what kernels read whose rows are queries or, `keys_first`, keys, by name."""
        return self._arrays | self.packed_mask(keys_first=keys_first)


forward = functools.partial(finish.forward, MmaCall)
"""Takes a kernel, operands and operations to output and log-sum-exp."""
backward = functools.partial(finish.backward, MmaBackward)
"""Takes kernels, operands, residuals and operations to gradients."""
