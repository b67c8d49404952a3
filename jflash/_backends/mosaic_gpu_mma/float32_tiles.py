"""Tiles of float32 calls, whose operands are two bfloat16 pieces or three."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jflash._backends.mosaic_gpu_mma.cta import Tile


def _tiles(*fields: tuple[int, int, int]) -> tuple[Tile, ...]:
    return tuple(Tile(*numbers) for numbers in fields)


_STREAMED = tuple(Tile(1, size, 1, streams=True) for size in (32, 16))
"""Where shared memory is too short for the operands of own rows."""
_BY_ROWS = (*_tiles((1, 32, 1), (1, 16, 1)), *_STREAMED)
_DBIAS = (
    *(Tile(1, 32, 1), Tile(1, 64, 1), Tile(1, 32, 1, lends=True), Tile(1, 16, 1, lends=True)),
    Tile(1, 32, 1, lends=True, streams=True),
)
"""Of the kernel with no sums, and all operands visited once."""

FLOAT32_TILES: Mapping[int, Mapping[str, Mapping[int, Sequence[Tile]]]] = {
    2: {
        "forward": {
            64: _tiles((1, 64, 1), (1, 32, 2), (2, 32, 1)),
            128: _tiles((1, 32, 1), (1, 64, 1), (1, 32, 2)),
            192: _tiles((1, 32, 1), (1, 64, 1), (1, 16, 1)),
            256: _tiles((1, 16, 1), (1, 32, 1)),
        },
        "short": {256: _tiles((1, 64, 1), (1, 32, 1), (1, 16, 1))},
        "dQ": {64: _tiles((1, 64, 1), (1, 32, 2), (2, 32, 1)), 256: _BY_ROWS},
        "d_key d_value": {64: _tiles((1, 32, 2), (1, 64, 1)), 256: _BY_ROWS},
        "d_key": {256: _BY_ROWS},
        "d_value": {256: _tiles((1, 32, 1), (1, 64, 1), (1, 16, 1))},
        "d_bias": {256: _DBIAS},
    },
    3: {
        "forward": {
            64: _tiles((1, 64, 1), (1, 32, 1), (2, 32, 1)),
            128: _tiles((1, 32, 1), (1, 64, 1)),
            192: _BY_ROWS,
            256: _STREAMED,
        },
        "short": {128: _tiles((1, 64, 1), (1, 32, 1)), 256: _BY_ROWS},
        "dQ": {64: _tiles((1, 32, 1), (1, 64, 1)), 256: _BY_ROWS},
        "d_key d_value": {64: _tiles((1, 32, 1), (1, 64, 1)), 256: _BY_ROWS},
        "d_key": {256: _BY_ROWS},
        "d_value": {256: _BY_ROWS},
        "d_bias": {256: _DBIAS},
    },
}
"""By the number of pieces: each kernel's tiles up to a larger head dim, of which some fit in 99 KiB. First come those
that are expected to be fast, as they are in 16 bits, and spill few registers; none was measured. One piece has the
tiles of 16 bits. The fused backward takes no pieces."""
