"""The threads of a warpgroup in numpy: what `hardware.lane_words` makes of MLIR, with an element for each of them."""

from __future__ import annotations

import types

import numpy as np

from jflash._backends.mosaic_gpu.hardware.lane_words import THREADS, LaneWords

THREAD = np.arange(THREADS, dtype=np.uint32)


class Arithmetic:
    """The operations of MLIR's that are used."""

    CmpIPredicate = types.SimpleNamespace(eq=np.equal, ne=np.not_equal, uge=np.greater_equal)
    andi, ori, xori = np.bitwise_and, np.bitwise_or, np.bitwise_xor
    addi, muli, shli, shrui = np.add, np.multiply, np.left_shift, np.right_shift
    negf, select = np.negative, np.where
    cmpi = staticmethod(lambda predicate, left, right: predicate(left, right))


class Numbers(LaneWords):
    """One of every thread."""

    def __init__(self):
        self.arith = Arithmetic
        self.warp, self.lane = np.divmod(THREAD, np.uint32(32))
        self.row, self.pair = np.divmod(self.lane, np.uint32(4))
        self.zero = np.zeros(THREADS, np.float32)

    def __call__(self, value: int) -> np.ndarray:
        return np.full(THREADS, value, np.uint32)
