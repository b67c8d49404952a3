"""A packed mask: its bits in the order in which threads hold logits.

Of 64 x 64 logits a thread holds 32: of row 16 warp + lane / 4, and of the row 8 below, the columns 8 j + 2 (lane % 4)
+ k for j < 8, k < 2. Their bits make one word; that of half h of the rows, j and k is at 16 h + 2 j + k.

Source of the layout: PTX ISA, wgmma, the accumulator's fragment.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, Bool, Int

from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder, array_type, by_thread, places, strided, tile

SIZE = 64
"""Rows and columns of the tile that the threads' words describe."""
KEYS_PER_LOAD = 16
"""Keys that a thread loads at once, a byte each."""


def pack(mask: Any, plane: Any, query: Any, key: Any, keys_first: bool) -> Int[Array, "128"]:
    """Return the words of 64 x 64 bits of a mask in device memory, `[#B, #N, T, S]`; bits past its ends are 0.

    They begin at a query and a key of the `[T, S]` slice with the index `plane`; S is a multiple of `KEYS_PER_LOAD`.
    """
    _, _, queries, keys = mask.shape

    def make(o: ThreadBuilder, mask: Any, plane: Any, query: Any, key: Any) -> Any:
        read = functools.partial(_read, o, mgpu.utils.memref_ptr(mask), plane, queries, keys)
        return by_thread(o, (_columns_of_rows if keys_first else _rows)(o, read, query, key))

    returns = array_type((THREADS,), jnp.int32, strided((THREADS,), 1))
    return ThreadBuilder.emit(make, mask, plane, query, key, returns=returns)


def _read(o: ThreadBuilder, base: Any, plane: Any, queries: int, keys: int, query: Any, key: Any) -> Any:
    """Return the bits of `KEYS_PER_LOAD` keys of one query."""
    utils: Any = mgpu.utils
    wide = lambda value: o.arith.extui(o.long_type, value)
    inside = o.arith.andi(o.below(query, o(queries)), o.below(key, o(keys)))
    query, key = (o.arith.select(inside, at, o(0)) for at in (query, key))
    line = o.arith.addi(o.arith.muli(wide(plane), o.long(queries)), wide(query))
    offset = o.arith.addi(o.arith.muli(line, o.long(keys)), wide(key))
    four = o.ir.VectorType.get((KEYS_PER_LOAD // 4,), o.type)
    loaded = utils.llvm.load(four, utils.getelementptr(base, [offset], o.ir.IntegerType.get_signless(8)))
    found: list[Any] = []
    for place in range(KEYS_PER_LOAD // 4):
        # Four bytes of 0 or 1 become the highest four bits: bit 8 n goes to 28 + n.
        bits = o.right(o.arith.muli(o.extract(loaded, place), o(1 << 28 | 1 << 21 | 1 << 14 | 1 << 7)), 28)
        found.append(o.left(bits, 4 * place))
    return o.arith.select(inside, o.either(*found), o(0))


def _rows(o: ThreadBuilder, read: Any, query: Any, key: Any) -> Any:
    """Return a thread's word where rows are queries: four lanes load a row's keys, and exchange them by shuffles."""
    row, column = o.add(query, o.left(o.warp, 4), o.row), o.add(key, o.left(o.pair, 4))
    bits = o.either(read(row, column), o.left(read(o.add(row, o(8)), column), 16))
    found: list[Any] = []
    for distance in range(4):
        other = mgpu.utils.shfl_bfly(bits, distance) if distance else bits
        of_both = _fields(o, other, (0x00030003, 0), (0x000C000C, 6))
        found.append(o.left(of_both, o.left(o.arith.xori(o.pair, o(distance)), 2)))
    return o.either(*found)


def _columns_of_rows(o: ThreadBuilder, read: Any, query: Any, key: Any) -> Any:
    """Return a thread's word where rows are keys: a lane loads two queries of a warp's 16 keys, and ballots give every
    lane all queries of a key."""
    nvvm: Any = mgpu.utils.nvvm
    column = o.add(key, o.left(o.warp, 4))
    seen = [read(o.add(query, o.lane, o(more)), column) for more in (0, 32)]
    rows = [[o(0), o(0)], [o(0), o(0)]]
    for at in range(KEYS_PER_LOAD):
        half, row = divmod(at, 8)
        is_own = o.same(o.row, o(row))
        for place, bits in enumerate(seen):
            votes = nvvm.vote_sync(o(0xFFFFFFFF), o.differ(o.arith.andi(bits, o(1 << at)), o(0)), "ballot")
            rows[half][place] = o.arith.select(is_own, votes, rows[half][place])
    short = lambda bits: _fields(o, bits, (0x3, 0), (0xC, 6), (0x30, 12), (0xC0, 18))
    return o.either(*(o.left(short(rows[half][at]), 16 * half + 8 * at) for half in range(2) for at in range(2)))


def _fields(o: ThreadBuilder, bits: Any, *fields: tuple[int, int]) -> Any:
    """Return the masked fields, or-ed together, each shifted right by its own amount: of bits of which each byte is
    shifted right before, so that its lowest two belong to this thread's columns."""
    shifted = o.right(bits, o.left(o.pair, 1))
    return o.either(*(o.arith.andi(o.right(shifted, by), o(field)) for field, by in fields))


def expand(words: Int[Array, "tiles 128"], shape: tuple[int, ...]) -> Bool[Array, "64 columns"]:
    """Return a tile of booleans; each of `words` describes 64 columns, or one alone fewer."""

    def make(o: ThreadBuilder, words: Any) -> Any:
        held = [o.extract(word, 0) for word in words.registers.flat]

        def is_set(word: Any, place: int) -> Any:
            # Hidden from LLVM, which would shift the bit first: one more instruction for each.
            alone = mgpu.utils.inline_ptx(f"and.b32 $0, $1, {1 << place:#x};", word, result_types=o.type)
            return o.differ(alone, o(0))

        def register(eight: int, half: int) -> Any:
            first = 16 * half + 2 * (eight % 8)
            return o.vector_of([is_set(held[eight // 8], first + k) for k in range(2)])

        return tile(shape, (register(*place) for place in places(shape[1])), is_signed=False)

    returns = array_type(shape, jnp.bool_)
    return ThreadBuilder.emit(make, words, returns=returns, layout=strided(words.shape, 1))
