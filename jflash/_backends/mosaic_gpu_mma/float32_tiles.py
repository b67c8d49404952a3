"""Tiles of float32 calls, whose operands are two bfloat16 pieces or three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jflash._backends.mosaic_gpu_mma.kernels.cta import Tile


def _tiles(*fields: tuple[int, int, int]) -> tuple[Tile, ...]:
    return tuple(Tile(*numbers) for numbers in fields)


_BY_ROWS = (Tile(1, 32, 1), Tile(1, 32, 1, held=1, lends=True), Tile(1, 16, 1), Tile(1, 16, 1, held=1, lends=True))
"""Of kernels with two operands of their own rows and wide heads: the first is held where shared memory is short."""
_DKV = (Tile(1, 32, 1), Tile(1, 16, 1), Tile(1, 16, 1, held=1, lends=True))
"""Of the kernel with the most sums, likewise: registers have no room for an operand beside larger tiles."""
_DBIAS = (Tile(1, 32, 1), Tile(1, 64, 1), *(Tile(1, size, 1, lends=True) for size in (32, 16)))
"""Of the kernel with no sums, and all operands visited once."""

FLOAT32_TILES: Mapping[int, Mapping[str, Mapping[int, Sequence[Tile]]]] = {
    2: {
        "forward": {
            64: _tiles((1, 64, 1), (1, 32, 2), (2, 32, 1)),
            128: _tiles((1, 32, 1), (1, 64, 1), (1, 32, 2)),
            256: _tiles((1, 32, 1), (1, 64, 1), (1, 16, 1)),
        },
        "short": {256: _tiles((1, 64, 1), (1, 32, 1), (1, 16, 1))},
        "dQ": {64: _tiles((1, 64, 1), (1, 32, 2), (2, 32, 1)), 256: _BY_ROWS},
        "d_key d_value": {64: _tiles((1, 32, 2), (1, 64, 1)), 256: _DKV},
        "d_key": {256: _BY_ROWS},
        "d_value": {256: _tiles((1, 32, 1), (1, 64, 1), (1, 16, 1))},
        "d_bias": {256: _DBIAS},
    },
    3: {
        "forward": {
            64: _tiles((1, 64, 1), (1, 32, 1), (2, 32, 1)),
            128: _tiles((1, 32, 1), (1, 64, 1)),
            256: _tiles((1, 32, 1), (1, 16, 1)),
        },
        "short": {128: _tiles((1, 64, 1), (1, 32, 1)), 256: _tiles((1, 32, 1), (1, 16, 1))},
        "dQ": {64: _tiles((1, 32, 1), (1, 64, 1)), 256: _BY_ROWS},
        "d_key d_value": {64: _tiles((1, 32, 1), (1, 64, 1)), 256: _DKV},
        "d_bias": {256: _DBIAS},
    },
}
"""By the number of pieces: each kernel's tiles up to a larger head dim, of which some fit in 99 KiB. First come those
that are expected to be fast, as they are in 16 bits, and spill few registers; none was measured. One piece has the
tiles of 16 bits. With three, shared memory has no room for heads so wide that dK and dV have a kernel each. The fused
backward takes no pieces."""
