"""The logits of a tile: in the forward in several forms, in a backward with their derivatives.

A form says what is loaded ahead, added to products, and done in the softmax. Every form is the same attention. They
differ in what stands between a product and its probability, and so in which registers a warpgroup has left and where
the compiler has to be told to wait. All backward kernels have the derivatives between S and P, and between dP and dS,
in primitives that Mosaic GPU lowers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.ops import Rows, Tile
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import mask_mod_reads, program_reads, score_mod_reads, softmax
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord
from jflash._backends.nvidia.tile.lowerable import lowerable
from jflash._backends.nvidia.tile.soft_cap import soft_cap
from jflash._backends.nvidia.tile.softmax import Exponent, Softmax
from jflash._backends.nvidia.walk.tile_range import TileContext
from jflash._semantics import tile as semantics
from jflash._semantics.logits import may_be_nan, modify_logits, without_unseen
from jflash._semantics.program_reads import read_name
from jflash._semantics.spec import Spec
from jflash._semantics.tile import Parameters

PullBack = Callable[[Array], tuple[Array, dict[str, Array]]]
"""Takes the logits' cotangents to those of the products and, by name, of the parameters."""
PushForward = Callable[[Array, dict[str, Array]], Array]
"""Takes the tangents of the products and, by name, of the parameters to those of the logits."""


def form(spec: Spec, *, sums_in_parts: bool) -> LogitsForm:
    """Return the form of a call's logits in a kernel whose products are those of queries and keys alone."""
    if facts_of(spec).is_plain:
        return Plain(sums_in_parts)
    kind = next((kind for kind in (LessDistances, SoftCapped) if kind.serves(spec)), LogitsForm)
    return kind(sums_in_parts)


@dataclasses.dataclass(frozen=True)
class LogitsForm:
    """Any logits: scale, cap, bias, ALiBi and score_mod are applied in registers."""

    sums_in_parts: bool
    """Whether registers are left for the parts of a row's sum."""
    max_warpgroups = 2
    """The most warpgroups that compute for which the form leaves registers."""
    bias_by_mma = False
    """Whether the matrix unit adds the bias, from `bf16_columns`."""
    first_m = -math.inf
    """m before the first tile, in a kernel whose first tile is like all others."""

    def prefetch(self, inputs: KernelInputs, at: TileCoord, keys: int, warpgroups: int) -> dict[str, Array]:
        """Load what registers are left for before the products of a tile of `keys` are issued."""
        shape = WARPGROUP_ROWS, keys
        bias = inputs.load_key_bias(at, shape) if warpgroups <= 2 else {}
        return inputs.load_packed_mask(at, shape) | bias

    def step(self, s: Tile, mask: TileContext, before: Softmax | None) -> Softmax:
        """Take the online softmax's step for a tile's products."""
        logits, exponent = mask.hide(_modified(s, mask), -jnp.inf), self.exponent(mask.inputs.spec)
        return softmax.step(exponent, logits, 1.0, mask, before, in_parts=self.sums_in_parts)

    def rescaled(self, inputs: KernelInputs, rescale: Rows, acc_o: Tile) -> Tile:
        """Return O relative to the last tile's m, from O relative to the m before it."""
        return softmax.scaled_rows(acc_o, rescale)

    def exponent(self, spec: Spec) -> Exponent:
        """Return the conversion in whose units m is."""
        return softmax.exponent(spec)

    def scheduling_fence(self, spec: Spec, keys: int, warpgroups: int, *, is_masked: bool) -> str | None:
        """Return the field of `Softmax` that is stored so that the compiler makes it before the wait for P V, if any.

        The compiler puts behind that wait whatever nothing needs before. The maxima should come before it; of three
        warpgroups the exponentials too, while of two one's run beside the other's products. Where logits take more
        arithmetic than a bias that was loaded ahead, and in tiles of 64 keys that need no mask, it does better alone.
        """
        if facts_of(spec).has_bias_tiles and warpgroups < 3:
            return None
        loads_bias_ahead = facts_of(spec).bias_kind == "column" and keys == 128
        return "rescale" if warpgroups == 3 or loads_bias_ahead else None


class Plain(LogitsForm):
    """Logits that are products: the scale is left to the exponent."""

    max_warpgroups = 4

    def scheduling_fence(self, spec: Spec, keys: int, warpgroups: int, *, is_masked: bool) -> str | None:
        if warpgroups == 3:
            return "rescale" if is_masked else None
        return "m" if keys == 128 or warpgroups == 4 or is_masked else None


class LessDistances(LogitsForm):
    """Products, scaled, less each key's distance times a slope: few registers more than products alone."""

    max_warpgroups = 3

    @staticmethod
    def serves(spec: Spec) -> bool:
        """Return whether a call's logits have this form."""
        others = spec.score_mod is not None or spec.logits_soft_cap is not None
        return spec.added == frozenset({"alibi_slopes"}) and not others


class SoftCapped(LogitsForm):
    """Logits that are products, scaled and capped: where all are small, the row's maximum is not needed."""

    first_m = 0.0

    @staticmethod
    def serves(spec: Spec) -> bool:
        """Whether a call's logits have this form, with a cap for which `SoftCap` has constants."""
        return facts_of(spec).follows_products and spec.logits_soft_cap is not None and spec.logits_soft_cap < 2**14

    def exponent(self, spec: Spec) -> Exponent:
        """Capped logits are in base 2 already."""
        return Exponent(1.0, exact=False)

    def scheduling_fence(self, spec: Spec, keys: int, warpgroups: int, *, is_masked: bool) -> str | None:
        return "rescale" if warpgroups == 3 else None

    def rescaled(self, inputs: KernelInputs, rescale: Rows, acc_o: Tile) -> Tile:
        is_same = inputs.ops.warp_all(rescale == 1)
        return lax.cond(is_same, lambda acc_o, _: acc_o, softmax.scaled_rows, acc_o, rescale)

    def step(self, s: Tile, mask: TileContext, before: Softmax | None) -> Softmax:
        return softmax.capped_step(s, mask, before, in_parts=self.sums_in_parts)


def _modified(s: Tile, mask: TileContext) -> Tile:
    """Return the logits of a tile of products; a plain call leaves its scale to the exponent."""
    inputs = mask.inputs
    if facts_of(inputs.spec).is_plain:
        return s
    tile = _tile(mask, s.shape)
    return lowerable(lambda s: modify_logits(score_mod_reads.rest(inputs.spec, tile), s, tile, _soft_cap(inputs)))(s)


def differentiate(
    s: Tile, mask: TileContext, probabilities: Callable[[Array], Array], wanted: Sequence[str]
) -> tuple[Tile, PullBack]:
    """Return a tile's probabilities from its products, 0 where the query does not see the key; and the way back.

    That takes cotangents of logits to those of the products and of the parameters `wanted`. A parameter's cotangent is
    that of its value at every element of the tile. A plain call's products have their logits' cotangent as it is: the
    scale is left to be applied to the sums.
    """
    inputs = mask.inputs
    if facts_of(inputs.spec).is_plain:
        return mask.hide(probabilities(s), 0.0), lambda cotangent: (cotangent, {})
    modify, parameters = _modification(mask, s.shape)
    values = {name: jnp.broadcast_to(value, s.shape) for name, value in _named(parameters, wanted).items()}
    logits, pull_back = lowerable(lambda s, values: jax.vjp(modify, s, values))(s, values)
    return mask.hide(probabilities(logits), 0.0), lowerable(pull_back)


def linearize(
    s: Tile, mask: TileContext, probabilities: Callable[[Array], Array], moving: Sequence[str]
) -> tuple[Tile, PushForward]:
    """Return a tile's probabilities as `differentiate` does, and the way forward.

    That takes tangents of the products and of the parameters `moving` to those of logits, 0 where no key is seen.
    """
    inputs = mask.inputs
    if facts_of(inputs.spec).is_plain:
        return mask.hide(probabilities(s), 0.0), lambda ts, _: ts * facts_of(inputs.spec).sums_scale
    modify, parameters = _modification(mask, s.shape)
    logits, push = lowerable(lambda s, values: jax.linearize(modify, s, values))(s, _named(parameters, moving))
    p = mask.hide(probabilities(logits), 0.0)
    # What padding holds may be NaN.
    return p, lambda ts, values: jnp.where(p == 0, 0.0, lowerable(push)(ts, values))


def _modification(
    mask: TileContext, shape: tuple[int, ...]
) -> tuple[Callable[[Array, dict[str, Array]], Array], Parameters]:
    """Return the logits of a tile as a function of its products and some parameters; and all parameters."""
    inputs, tile = mask.inputs, _tile(mask, shape)
    # Before anything is differentiated: what a mask_mod reads has no derivative in a kernel.
    seen = mask_mod_reads.visible(inputs, mask.at, tile) if may_be_nan(inputs.spec) else None

    def modify(s: Array, values: dict[str, Array]) -> Array:
        others = {name: value for name, value in values.items() if name in tile.parameters._fields}
        reads = enumerate(tile.parameters.score_mod_arrays)
        reads = tuple(values.get(read_name(place), read) for place, read in reads)
        given = tile.parameters._replace(**others, score_mod_arrays=reads)
        if seen is not None:
            given = without_unseen(inputs.spec, given, seen)
        spec = score_mod_reads.rest(inputs.spec, tile)
        return modify_logits(spec, s, tile._replace(parameters=given), _soft_cap(inputs))

    return modify, tile.parameters


def parameter_tangents(
    tangents: KernelInputs, mask: TileContext, shape: tuple[int, ...], loaded: Loaded, names: Sequence[str]
) -> dict[str, Any]:
    """Return the tangents of a tile's parameters by name, from the inputs `tangents` and what was `loaded` of them."""
    reads = program_reads.load(tangents, "score_mod", mask.at, mask.inputs.tile(mask.at, shape, mask.loaded))
    return _named(tangents.parameters(mask.at, shape, loaded)._replace(score_mod_arrays=reads), names)


def _tile(mask: TileContext, shape: tuple[int, ...]) -> semantics.Tile:
    """Return a tile, with what its score_mod reads in the place of the arrays."""
    tile = mask.inputs.tile(mask.at, shape, mask.loaded)
    reads = program_reads.load(mask.inputs, "score_mod", mask.at, tile)
    return tile._replace(parameters=tile.parameters._replace(score_mod_arrays=reads))


def _named(parameters: Parameters, names: Sequence[str]) -> dict[str, Any]:
    """Return parameters of a tile by name; each read of a score_mod has one."""
    reads = {read_name(place): read for place, read in enumerate(parameters.score_mod_arrays)}
    return {name: reads[name] if name in reads else getattr(parameters, name) for name in names}


def _soft_cap(inputs: KernelInputs) -> Callable[[Array, Array | float, float], Array]:
    return lambda s, scale, cap: soft_cap(s, scale, cap, inputs.ops.warp_all_below)
