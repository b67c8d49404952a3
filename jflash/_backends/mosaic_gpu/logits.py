"""The forms of a forward's logits: what each loads ahead, adds to products, and does in the softmax.

Every form is the same attention. They differ in what stands between a product and its probability, and so in which
registers a warpgroup has left and where the compiler has to be told to wait.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import exponent, gradient, online_softmax
from jflash._backends.mosaic_gpu.exponent import Exponent
from jflash._backends.mosaic_gpu.hardware import WARPGROUP_ROWS
from jflash._backends.mosaic_gpu.inputs import KernelInputs, TileCoord, bias_and_mask, bias_columns
from jflash._backends.mosaic_gpu.online_softmax import Softmax
from jflash._backends.mosaic_gpu.schedule import RowTiles, TileMask
from jflash._semantics.spec import Spec

Rows = Float[Array, "rows D"]
Tile = Float[Array, "rows keys"]


def form(spec: Spec) -> LogitsForm:
    """The form of a call's logits."""
    if bias_columns.serves(spec):
        return BiasByMma()
    if exponent.is_plain(spec):
        return Plain()
    return SoftCapped() if SoftCapped.serves(spec) else LogitsForm()


class LogitsForm:
    """Any logits: scale, cap, bias, ALiBi and score_mod are applied in registers."""

    max_warpgroups = 2
    """The most warpgroups that compute for which the form leaves registers."""
    bias_by_mma = False
    """Whether the matrix unit adds the bias, from `bias_columns`."""

    def prefetch(self, inputs: KernelInputs, at: TileCoord, tile: RowTiles) -> dict[str, Array]:
        """What is loaded of a tile before its products are issued, where registers are left."""
        shape = WARPGROUP_ROWS, tile.keys
        bias = inputs.load_key_bias(at, shape) if tile.warpgroups <= 2 else {}
        return inputs.load_packed_mask(at, shape) | bias

    def step(self, s: Tile, mask: TileMask, before: Softmax | None, dtype: Any) -> Softmax:
        """The online softmax's step for a tile's products."""
        logits = gradient.logits(s, mask)
        return online_softmax.step(self.exponent(mask.inputs.spec), mask.hide(logits, -jnp.inf), 1.0, before, dtype)

    def rescaled(self, inputs: KernelInputs, state: Softmax, acc_o: Rows) -> Rows:
        """O relative to the last tile's m, from O relative to the m before it."""
        return online_softmax.scaled_rows(acc_o, state.rescale)

    def exponent(self, spec: Spec) -> Exponent:
        """What m is in the units of."""
        return exponent.exponent(spec)

    def scheduling_fence(self, spec: Spec, tile: RowTiles, *, is_masked: bool) -> str | None:
        """The field of `Softmax` that is stored so that the compiler makes it before the wait for P V, if any.

        The compiler puts behind that wait whatever nothing needs before. The maxima should come before it; of three
        warpgroups the exponentials too, while of two one's run beside the other's products. Where logits take more
        arithmetic than a bias that was loaded ahead, and in tiles of 64 keys that need no mask, it does better alone.
        """
        if bias_and_mask.has_bias_tiles(spec) and tile.warpgroups < 3:
            return None
        loads_bias_ahead = bias_and_mask.bias_kind(spec) == "column" and tile.keys == 128
        return "rescale" if tile.warpgroups == 3 or loads_bias_ahead else None


class Plain(LogitsForm):
    """Logits that are products: the scale is left to the exponent."""

    max_warpgroups = 4

    def scheduling_fence(self, spec: Spec, tile: RowTiles, *, is_masked: bool) -> str | None:
        if tile.warpgroups == 3:
            return "rescale"
        return "m" if tile.keys == 128 or tile.warpgroups == 4 or is_masked else None


class BiasByMma(Plain):
    """Products to which the matrix unit adds the bias of keys; large biases are added in registers."""

    bias_by_mma = True

    def prefetch(self, inputs: KernelInputs, at: TileCoord, tile: RowTiles) -> dict[str, Array]:
        has_large = bias_columns.load_has_large(inputs, at, tile.keys)
        return inputs.load_packed_mask(at, (WARPGROUP_ROWS, tile.keys)) | has_large

    def step(self, s: Tile, mask: TileMask, before: Softmax | None, dtype: Any) -> Softmax:
        numbers, unit = bias_columns.with_large_biases(mask.inputs, s, mask.at, mask.loaded)
        numbers = mask.hide(numbers, -jnp.inf)
        return online_softmax.step(self.exponent(mask.inputs.spec), numbers, unit, before, dtype)


class SoftCapped(LogitsForm):
    """Logits that are products, scaled and capped: where all are small, the row's maximum is not needed."""

    @staticmethod
    def serves(spec: Spec) -> bool:
        """Whether a call's logits have this form, with a cap for which `SoftCap` has constants."""
        return exponent.follows_products(spec) and spec.logits_soft_cap is not None and spec.logits_soft_cap < 2**14

    def exponent(self, spec: Spec) -> Exponent:
        """Capped logits are in base 2 already."""
        return Exponent(1.0, exact=False)

    def scheduling_fence(self, spec: Spec, tile: RowTiles, *, is_masked: bool) -> str | None:
        return "rescale" if tile.warpgroups == 3 else None

    def rescaled(self, inputs: KernelInputs, state: Softmax, acc_o: Rows) -> Rows:
        is_same = inputs.ops.warp_all(state.rescale == 1)
        return lax.cond(is_same, lambda acc_o, _: acc_o, online_softmax.scaled_rows, acc_o, state.rescale)

    def step(self, s: Tile, mask: TileMask, before: Softmax | None, dtype: Any) -> Softmax:
        return online_softmax.capped_step(s, mask, before, dtype)
