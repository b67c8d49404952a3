"""A packed mask: its bits in the order in which threads hold logits.

Of 64 x 64 logits a thread holds 32: of row 16 warp + lane / 4, and of the row 8 below, the columns 8 j + 2 (lane % 4)
+ k for j < 8, k < 2. Their bits make one word; that of half h of the rows, j and k is at 16 h + 2 j + k.

`pack` and `expand` are written as operations of MLIR; the tests hold them against plain array code.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder

SIZE = 64
"""Rows and columns of the tile that the threads' words describe."""
KEYS_PER_LOAD = 16
"""Keys that a thread loads at once, a byte each."""

_words = functools.partial(plgpu.Layout.WG_STRIDED, vec_size=1)
"""The layout of words `[..., 128]`: one for each thread."""


def pack(mask: Any, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
    """The words of 64 x 64 bits of a mask in device memory, `[#B, #N, T, S]`; bits past its ends are 0.

    Args:
      mask: a reference; S is a multiple of `KEYS_PER_LOAD`.
      plane: the index of a `[T, S]` slice.
      query, key: where the bits begin.
      keys_first: whether the rows of logits are keys.
    """
    _, _, queries, keys = mask.shape
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.dtype(jnp.int32), layout=_words((THREADS,))),
    )
    def packed(_: Any, mask: Any, *places: Any) -> Any:
        o = ThreadBuilder()
        plane, query, key = (place.registers.item() for place in places)
        base = mgpu.utils.memref_ptr(mask)
        read = functools.partial(_read, o, base, plane, queries, keys)
        make = _columns_of_rows if keys_first else _rows
        word = make(o, read, query, key)
        registers = np.empty((1,), dtype=object)
        registers[0] = o.vector.from_elements(o.ir.VectorType.get((1,), o.type), [word])
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGStridedFragLayout((THREADS,), 1), _is_signed=True
        )

    call: Any = packed
    return call(mask, plane, query, key)


def _read(o: ThreadBuilder, base: Any, plane: Any, queries: int, keys: int, query: Any, key: Any) -> Any:
    """The bits of `KEYS_PER_LOAD` keys of one query."""
    utils: Any = mgpu.utils
    long, byte = (o.ir.IntegerType.get_signless(bits) for bits in (64, 8))
    wide = lambda value: o.arith.extui(long, value)
    below = lambda at, stop: o.arith.cmpi(o.arith.CmpIPredicate.slt, at, o(stop))
    inside = o.arith.andi(below(query, queries), below(key, keys))
    query, key = (o.arith.select(inside, at, o(0)) for at in (query, key))
    line = o.arith.addi(o.arith.muli(wide(plane), utils.c(queries, long)), wide(query))
    offset = o.arith.addi(o.arith.muli(line, utils.c(keys, long)), wide(key))
    four = o.ir.VectorType.get((KEYS_PER_LOAD // 4,), o.type)
    loaded = utils.llvm.load(four, utils.getelementptr(base, [offset], byte))
    found: list[Any] = []
    for part in range(KEYS_PER_LOAD // 4):
        four_bytes = o.vector.extract(loaded, [], o.ir.DenseI64ArrayAttr.get([part]))
        # Four bytes of 0 or 1 become the highest four bits: bit 8 n goes to 28 + n.
        bits = o.right(o.arith.muli(four_bytes, o(1 << 28 | 1 << 21 | 1 << 14 | 1 << 7)), 28)
        found.append(o.left(bits, 4 * part))
    return o.arith.select(inside, o.either(*found), o(0))


def _rows(o: ThreadBuilder, read: Any, query: Any, key: Any) -> Any:
    """Rows are queries: four lanes load a row's keys, and exchange them by shuffles."""
    row, column = o.add(query, o.left(o.warp, 4), o.row), o.add(key, o.left(o.pair, 4))
    bits = o.either(read(row, column), o.left(read(o.add(row, o(8)), column), 16))
    found: list[Any] = []
    for distance in range(4):
        other = mgpu.utils.shfl_bfly(bits, distance) if distance else bits
        of_both = o.fields(o.own(other), (0x00030003, 0), (0x000C000C, 6))
        found.append(o.left(of_both, o.left(o.arith.xori(o.pair, o(distance)), 2)))
    return o.either(*found)


def _columns_of_rows(o: ThreadBuilder, read: Any, query: Any, key: Any) -> Any:
    """Rows are keys: a lane loads two queries of a warp's 16 keys; ballots give every lane all queries of a key."""
    nvvm: Any = mgpu.utils.nvvm
    column = o.add(key, o.left(o.warp, 4))
    seen = [read(o.add(query, o.lane, o(more)), column) for more in (0, 32)]
    rows = [[o(0), o(0)], [o(0), o(0)]]
    for at in range(KEYS_PER_LOAD):
        half, row = divmod(at, 8)
        is_own = o.arith.cmpi(o.arith.CmpIPredicate.eq, o.row, o(row))
        for part, bits in enumerate(seen):
            bit = o.arith.cmpi(o.arith.CmpIPredicate.ne, o.arith.andi(bits, o(1 << at)), o(0))
            votes = nvvm.vote_sync(o(0xFFFFFFFF), bit, "ballot")
            rows[half][part] = o.arith.select(is_own, votes, rows[half][part])
    short = lambda bits: o.fields(o.own(bits), (0x3, 0), (0xC, 6), (0x30, 12), (0xC0, 18))
    return o.either(*(o.left(short(rows[half][part]), 16 * half + 8 * part) for half in range(2) for part in range(2)))


def expand(words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "64 columns"]:
    """A tile of booleans in the layout of logits; each of `words` describes 64 columns, or one alone fewer."""
    return_type = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bool_), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_words(words.shape),), return_type=return_type)
    def expanded(_: Any, words: Any) -> Any:
        utils: Any = mgpu.utils
        arith, vector = utils.arith, utils.vector
        number, bit = (utils.ir.IntegerType.get_signless(bits) for bits in (32, 1))
        two = utils.ir.VectorType.get((2,), bit)
        own = [vector.extract(word, [], utils.ir.DenseI64ArrayAttr.get([0])) for word in words.registers.flat]

        def is_set(word: Any, place: int) -> Any:
            # Hidden from LLVM, which would shift the bit first: one more instruction for each.
            alone = utils.inline_ptx(f"and.b32 $0, $1, {1 << place:#x};", word, result_types=number)
            return arith.cmpi(arith.CmpIPredicate.ne, alone, utils.c(0, number))

        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
        for index in np.ndindex(registers.shape):
            _, eight, _, _, half, *_ = index
            word, place = own[eight // 8], 16 * half + 2 * (eight % 8)
            registers[index] = vector.from_elements(two, [is_set(word, place), is_set(word, place + 1)])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=False)

    call: Any = expanded
    return call(words)
