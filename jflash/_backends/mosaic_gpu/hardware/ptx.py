"""Instructions that Pallas does not have, for `plgpu.inline_mgpu`: votes of a warp, tickets, and signals."""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.mosaic import gpu as mgpu

_utils: Any = mgpu.utils


def all_below(_: Any, tile: Any, limit: float) -> Any:
    """Whether all magnitudes that a warp's threads hold of a tile are below `limit`."""
    arith, vector = _utils.arith, _utils.vector
    integer, number = _utils.ir.IntegerType.get_signless(32), _utils.ir.F32Type.get()
    element = lambda pair, at: vector.extract(pair, [], _utils.ir.DenseI64ArrayAttr.get([at]))
    # Without the sign, which is the highest bit.
    bits = lambda x: arith.andi(arith.bitcast(integer, x), _utils.c(0x7FFFFFFF, integer))
    sizes = [arith.bitcast(number, bits(element(pair, at))) for pair in tile.registers.flat for at in range(2)]
    # A tree: in a chain each would wait for the one before. NaN is the largest, and below nothing.
    while len(sizes) > 1:
        sizes = [arith.maximumf(*two) for two in zip(sizes[::2], sizes[1::2], strict=True)]
    return _vote_all(arith.cmpf(arith.CmpFPredicate.OLT, sizes[0], _utils.c(limit, number)))


def all_rows(_: Any, condition: Any) -> Any:
    """Whether a condition holds for all rows of a warp's threads."""
    first = _utils.ir.DenseI64ArrayAttr.get([0])
    own = [_utils.vector.extract(row, [], first) for row in condition.registers.flat]
    return _vote_all(functools.reduce(_utils.arith.andi, own))


def _vote_all(own: Any) -> Any:
    every = _utils.c(0xFFFFFFFF, _utils.ir.IntegerType.get_signless(32))
    return mgpu.FragmentedArray.splat(_utils.nvvm.vote_sync(every, own, "all"), (), is_signed=False)


def nothing(_: Any) -> None:
    """No instruction, but one that the compiler neither drops nor moves."""
    _utils.inline_ptx("", has_side_effects=True)


def signal(_: Any, counter: Any) -> None:
    """Increment `counter` with release semantics, once for the warpgroup."""
    mgpu.warpgroup_barrier()
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        add = "red.release.gpu.global.add.s32 [$0], 1;"
        _utils.inline_ptx(add, _utils.memref_ptr(counter), has_side_effects=True)


def wait_for(_: Any, counter: Any, value: int) -> None:
    """Poll `counter` with acquire semantics until it has a value."""
    loop = """{ .reg .pred other; .reg .b32 now;
            again: ld.acquire.gpu.global.s32 now, [$0]; setp.ne.s32 other, now, $1; @other bra again; }"""
    wanted = mgpu.c(value, _utils.ir.IntegerType.get_signless(32))
    _utils.inline_ptx(loop, _utils.memref_ptr(counter), wanted, has_side_effects=True)
    # What threads wrote themselves comes before what copies do now.
    _utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


def take_ticket(_: Any, counter: Any, ticket: Any) -> None:
    """Increment `counter` once for the warpgroup; its old value goes to `ticket`, in shared memory."""
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        integer = _utils.ir.IntegerType.get_signless(32)
        add = "atom.relaxed.gpu.global.add.s32 $0, [$1], 1;"
        old = _utils.inline_ptx(add, _utils.memref_ptr(counter), result_types=integer, has_side_effects=True)
        _utils.memref.store(old, ticket, [_utils.c(0, _utils.ir.IndexType.get())])
