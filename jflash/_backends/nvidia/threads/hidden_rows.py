"""Zeros for rows of device memory whose log-sum-exp is -inf, by one warp for each 32 rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Any

from jax.experimental.mosaic import gpu as mgpu

from jflash._backends.nvidia.threads.builder import LANES, ThreadBuilder

_utils: Any = mgpu.utils


def zero(rows: Any, lse: Any, first: Any) -> None:
    """Zero those of 128 rows from `first` on of `rows`, `[L, columns]`, whose number in `lse`, `[L]`, is -inf."""

    def make(o: ThreadBuilder, rows: Any, lse: Any, first: Any) -> None:
        length, columns = o.shape(rows)
        place = lambda *words: [o.arith.index_cast(o.ir.IndexType.get(), word) for word in words]

        def is_hidden(row: Any) -> Any:
            number = _utils.memref.load(lse, place(row))
            return o.arith.cmpf(o.arith.CmpFPredicate.OEQ, number, _utils.c(-math.inf, o.zero.type))

        def zero_row(row: Any) -> None:
            with _loop(o, o(0), o(columns), LANES) as column:
                # Past the end a lane stores the last number again: so lanes never part ways.
                column = o.arith.minsi(o.add(column, o.lane), o(columns - 1))
                _utils.memref.store(_utils.c(0.0, o.dtype(rows)), rows, place(row, column))

        warp_first = o.add(first, o.times(o.warp, LANES))
        own = o.arith.minsi(o.add(warp_first, o.lane), o(length - 1))
        with mgpu.when(_utils.nvvm.vote_sync(o(-1), is_hidden(own), "any")):
            end = o.arith.minsi(o.add(warp_first, o(LANES)), o(length))
            with _loop(o, warp_first, end, 1) as row, mgpu.when(is_hidden(row)):
                zero_row(row)

    ThreadBuilder.emit(make, rows, lse, first)


@contextlib.contextmanager
def _loop(o: ThreadBuilder, start: Any, stop: Any, step: int) -> Generator[Any]:
    """Put instructions in a loop, whose index is given."""
    loop = _utils.scf.ForOp(start, stop, o(step))
    with o.ir.InsertionPoint(loop.body):
        yield loop.induction_variable
        _utils.scf.yield_([])
