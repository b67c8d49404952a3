"""Sums of what the warps of a warpgroup have, by way of shared memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.threads.builder import LANES, WARPS, array_type, tile

NUMBERS = 8
"""Numbers of each thread that go through shared memory together: those of 16 columns."""


def sum_of_warps(
    values: Float[Array, "64 columns"], scratch: Ref, *, made_of_bytes: bool
) -> Float[Array, "64 columns"]:
    """Return for each warp's 16 rows the sum of all warps'.

    Args:
      values: sums by `mma.sync`.
      scratch: a float32 buffer `[WARPS, NUMBERS, LANES]` in shared memory.
      made_of_bytes: whether B was of 8-bit numbers. Their columns come back in order.
    """

    def make(o: Lanes, values: Any, scratch: Any) -> Any:
        given = [number for pair in values.registers.flat for number in o.numbers(pair)]
        pairs = list(itertools.batched(sums(o, given, o.shared_address(scratch), made_of_bytes=made_of_bytes), 2))
        return tile(values.shape, map(o.vector_of, pairs))

    return Lanes.emit(make, values, scratch, returns=array_type(values.shape, jnp.float32))


def sums(o: Lanes, given: Sequence[Any], base: Any, *, made_of_bytes: bool) -> list[Any]:
    """Return the sums of a thread's numbers, in the order of an accumulator's registers, over all warps."""
    word, of_warp = 4 * LANES, 4 * LANES * NUMBERS
    own = o.add(base, o.times(o.warp, of_warp), o.left(o.lane, 2))
    source = o.add(base, o.left(o.lane, 2))
    if made_of_bytes:
        # A lane has four neighbours of 16 columns: the first and third in one register, the others eight columns on.
        lane_of_column = o.add(o.times(o.row, 4), o.right(o.pair, 1))
        source = o.add(base, o.left(lane_of_column, 2), o.times(o.arith.andi(o.pair, o(1)), word))
    found = list[Any]()
    for numbers in itertools.batched(given, NUMBERS):
        o.meet()
        for place, number in enumerate(numbers):
            o.store_word(own, place * word, o.bits(number))
        o.meet()
        for place in range(NUMBERS):
            at = _place_of_bytes(place) if made_of_bytes else place * word
            of_warps = (o.load_number(source, warp * of_warp + at) for warp in range(WARPS))
            found.append(functools.reduce(o.arith.addf, of_warps))
    return found


def _place_of_bytes(place: int) -> int:
    """Return where a number is whose columns are in order, in bytes from what the lane's first column has."""
    eight, half, k = place // 4, place // 2 % 2, place % 2
    return 4 * LANES * (4 * k + 2 * half) + 4 * 2 * eight
