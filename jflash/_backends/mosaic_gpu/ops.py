"""What a warpgroup does on Hopper: products by its matrix unit, and additions and signals in device memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu import panels
from jflash._backends.nvidia.ops import Ops, Ref, Tile
from jflash._backends.nvidia.threads import eights, pieces, sums
from jflash._backends.nvidia.threads.builder import ThreadBuilder, strided

_MOST_COLUMNS = 256
"""N of the matrix unit's instruction."""

_utils: Any = mgpu.utils


class WarpgroupOps(Ops):
    """The operations of a warpgroup on Hopper, which goes on while the matrix unit makes products, in their order."""

    def accumulators[Results](self, body: Callable[..., Results], *shapes: tuple[int, int]) -> Results:
        """Return what `body` returns for accumulators of zeros of some `shapes`, which it may set before it adds."""
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def accumulate[Results](
        self, body: Callable[..., Results], *acc: Tile, like: Results
    ) -> tuple[Results, tuple[Tile, ...]]:
        """Return what `body` returns for accumulators that begin at `acc`, in the types of `like`; and their values."""
        leaves, tree = jax.tree.flatten(like)

        def store(refs: Any) -> None:
            accumulators, results = refs[: len(acc)], refs[len(acc) :]
            values = jax.tree.leaves(body(*accumulators))
            for ref, value in zip(results, values, strict=True):
                ref[...] = value

        done: Any = pl.run_state(store)((*map(plgpu.ACC.init, acc), *leaves))
        return jax.tree.unflatten(tree, done[len(acc) :]), tuple(done[: len(acc)])

    def mma(self, accumulator: Any, a: Any, b: Any) -> None:
        """Issue accumulator += a @ b; more columns than the instruction has are two products."""
        columns = accumulator.shape[1]
        if isinstance(b, panels.Panels):
            every = panels.products(accumulator, a, b)
        elif columns <= _MOST_COLUMNS:
            every = [(accumulator, a, b)]
        else:
            chunks = pl.ds(0, _MOST_COLUMNS), pl.ds(_MOST_COLUMNS, columns - _MOST_COLUMNS)
            every = [(accumulator.at[:, chunk], a, b.at[:, chunk]) for chunk in chunks]
        for operands in every:
            plgpu.wgmma(*operands)

    def read(self, accumulator: Any, pending: int = 0) -> Tile:
        """Return an accumulator, when all products but the last `pending` are made."""
        return plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)

    def wait(self, pending: int) -> None:
        """Wait until all products but the last `pending` are made."""
        plgpu.wgmma_wait(pending)

    def cond(self, condition: Any, last: Callable[[], None], nothing: Callable[[], None]) -> None:
        """Do `last`, which issues products and reads them all; or else `nothing`, when all products are made."""

        def wait() -> None:
            plgpu.wgmma_wait(0)
            nothing()

        lax.cond(condition, last, wait)

    def reduce_add(self, destination: Ref, source: Ref) -> None:
        """Issue a copy that adds shared memory to device memory."""
        plgpu.copy_smem_to_gmem(source, destination, reduction_op="add")

    def zeros_strided(self, shape: tuple[int, ...]) -> Array:
        """Return zeros in the layout of `load_strided`."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), strided(shape))

    def store_strided(self, ref: Ref, values: Tile, first: Any) -> None:
        """Store rows in the layout of `load_strided` from row `first` on, as far as the array has them and columns."""

        def make(o: ThreadBuilder, target: Any, values: Any, first: Any) -> None:
            index = o.ir.IndexType.get()
            ends = [_utils.c(size, index) for size in o.shape(target)]
            columns = _utils.c(values.shape[1], index)
            first = o.arith.index_cast(index, first)
            for place, numbers in zip(values.layout.linear_thread_idxs(), values.registers.flat, strict=True):
                at = [o.arith.addi(first, o.arith.divui(place, columns)), o.arith.remui(place, columns)]
                with mgpu.when(o.arith.andi(*(o.below(*pair) for pair in zip(at, ends, strict=True)))):
                    _utils.vector.store(numbers, target, at)

        ThreadBuilder.emit(make, ref, values, first, layout=strided(values.shape))

    load_eights = staticmethod(eights.load)
    times_eights = staticmethod(eights.times)
    piece_columns = staticmethod(pieces.in_columns)
    add_to_sums = staticmethod(sums.add)
    store_sums = staticmethod(sums.store)

    def take_turn(self, warpgroup: Any) -> None:
        """Wait until the turn has been passed to this warpgroup, as often as it waited before and once more."""
        ThreadBuilder.emit(functools.partial(_turn, action="sync"), jnp.int32(warpgroup))

    def pass_turn(self, warpgroup: Any) -> None:
        """Pass the turn to a warpgroup: it has to take it before it is passed to it again."""
        ThreadBuilder.emit(functools.partial(_turn, action="arrive"), jnp.int32(warpgroup))

    def take_ticket(self, counter: Ref, ticket: Ref) -> None:
        """Increment an integer in device memory, and store its old value in shared memory."""
        ThreadBuilder.emit(_take_ticket, counter, ticket)

    def take_number(self, counter: Ref, number: Ref) -> Int[Array, ""]:
        """Publish all that this warpgroup did, increment an integer in device memory, and see what was done before.

        Returns:
          The integer's old value, which passes through a number of shared memory that is this warpgroup's.
        """

        def make(o: ThreadBuilder, counter: Any, number: Any) -> None:
            mgpu.warpgroup_barrier()
            _take_ticket(o, counter, number, order="acq_rel")
            mgpu.warpgroup_barrier()

        ThreadBuilder.emit(make, counter, number)
        return number[0]

    def signal(self, counter: Ref) -> None:
        """Increment an integer in device memory, and with it publish all that this warpgroup did."""

        def make(_: ThreadBuilder, counter: Any) -> None:
            mgpu.warpgroup_barrier()
            with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
                add = "red.release.gpu.global.add.s32 [$0], 1;"
                _utils.inline_ptx(add, _utils.memref_ptr(counter), has_side_effects=True)

        ThreadBuilder.emit(make, counter)

    def count_and_wait(self, counter: Ref, before: Ref, least: Int[Array, ""]) -> None:
        """Increment an integer in device memory, and with it publish all that this warpgroup knows to be done; and wait
        until another is `least` or more, and see what was done before; not if that is 0.

        Two warps do it at once, as each takes as long as device memory.
        """

        def make(_: ThreadBuilder, counter: Any, before: Any, least: Any) -> None:
            mgpu.warpgroup_barrier()
            # What others added comes before what copies of this CTA add now.
            both = """{ .reg .pred counts, waits, behind; .reg .b32 thread, now;
            mov.u32 thread, %tid.x; and.b32 thread, thread, 127;
            setp.eq.u32 counts, thread, 32; @counts red.release.gpu.global.add.s32 [$0], 1;
            setp.eq.u32 waits, thread, 0; setp.lt.and.s32 behind, 0, $2, waits; @!behind bra done;
            again: ld.acquire.gpu.global.s32 now, [$1]; setp.lt.s32 behind, now, $2; @behind bra again;
            fence.proxy.async; done: }"""
            addresses = map(_utils.memref_ptr, (counter, before))
            _utils.inline_ptx(both, *addresses, least, has_side_effects=True)
            mgpu.warpgroup_barrier()

        ThreadBuilder.emit(make, counter, before, least)

    def wait_for(self, counter: Ref, value: int) -> None:
        """Wait until an integer in device memory has a value, and see what was done before it had."""

        def make(o: ThreadBuilder, counter: Any) -> None:
            loop = """{ .reg .pred other; .reg .b32 now;
            again: ld.acquire.gpu.global.s32 now, [$0]; setp.ne.s32 other, now, $1; @other bra again; }"""
            _utils.inline_ptx(loop, _utils.memref_ptr(counter), o(value), has_side_effects=True)
            # What threads wrote themselves comes before what copies do now.
            _utils.inline_ptx("fence.proxy.async;", has_side_effects=True)

        ThreadBuilder.emit(make, counter)


HOPPER = WarpgroupOps()


def _turn(o: ThreadBuilder, warpgroup: Any, action: str) -> None:
    # Named barriers: Mosaic GPU has one for each warpgroup, from 1 on, and there are 16.
    barrier = o.add(warpgroup, o(8))
    # The threads of two warpgroups: who waits, and who passes.
    _utils.inline_ptx(f"barrier.cta.{action}.aligned $0, 256;", barrier, has_side_effects=True)


def _take_ticket(o: ThreadBuilder, counter: Any, ticket: Any, order: str = "relaxed") -> None:
    with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
        add = f"atom.{order}.gpu.global.add.s32 $0, [$1], 1;"
        old = _utils.inline_ptx(add, _utils.memref_ptr(counter), result_types=o.type, has_side_effects=True)
        _utils.memref.store(old, ticket, [_utils.c(0, _utils.ir.IndexType.get())])
