"""The threads of a warpgroup in numpy: what `builder` makes of MLIR, with an element for each of them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import matrix_unit
import numpy as np

from jflash._backends.mosaic_gpu_mma.lanes import Lanes
from jflash._backends.nvidia.threads.builder import THREADS, ThreadBuilder

THREAD = np.arange(THREADS, dtype=np.uint32)
LANE = np.arange(32)


class Arithmetic:
    """The operations of MLIR's that are used."""

    CmpIPredicate = types.SimpleNamespace(
        eq=np.equal,
        ne=np.not_equal,
        uge=np.greater_equal,
        ult=np.less,
        slt=lambda left, right: left.astype(np.int32) < right.astype(np.int32),
    )
    CmpFPredicate = types.SimpleNamespace(UNE=np.not_equal)
    andi, ori, xori = np.bitwise_and, np.bitwise_or, np.bitwise_xor
    addi, subi, muli, shli, shrui = np.add, np.subtract, np.multiply, np.left_shift, np.right_shift
    divui, remui = np.floor_divide, np.remainder
    addf, subf, mulf, negf, select = np.add, np.subtract, np.multiply, np.negative, np.where
    minsi, maxsi, shrsi = (
        staticmethod(lambda left, right, make=make: make(left.view(np.int32), right.view(np.int32)).view(np.uint32))
        for make in (np.minimum, np.maximum, np.right_shift)
    )
    cmpi = cmpf = staticmethod(lambda predicate, left, right: predicate(left, right))


class Numbers(ThreadBuilder):
    """One of every thread."""

    def __init__(self):
        self.arith = Arithmetic
        self.warp, self.lane = np.divmod(THREAD, np.uint32(32))
        self.row, self.pair = np.divmod(self.lane, np.uint32(4))
        self.zero = np.zeros(THREADS, np.float32)

    def __call__(self, value: int) -> np.ndarray:
        return np.full(THREADS, value, np.uint32)

    def float32(self, number: np.ndarray) -> np.ndarray:
        return number.view(np.int32).astype(np.float32)

    def opaque(self, word: Any) -> Any:
        return word

    def plus(self, number: np.ndarray, constant: float) -> np.ndarray:
        return number + np.float32(constant)

    def change_where(
        self, change: str, comparison: str, word: np.ndarray, limit: int, numbers: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        sizes, limit = np.abs(word.view(np.float16).reshape(-1, 2)), np.uint16(limit).view(np.float16)
        where = {"lt": sizes < limit, "gtu": ~(sizes <= limit)}[comparison]
        changed = {"clear": lambda x: x * np.float32(0), "negate": np.negative}[change]
        return [np.where(where[:, half], changed(number), number) for half, number in enumerate(numbers)]

    def rounded(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        low, high = (number.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32) for number in numbers)
        return low | high << 16

    def of_neighbour(self, word: np.ndarray) -> np.ndarray:
        return word.reshape(-1, 2)[:, ::-1].reshape(-1)

    def number(self, bits: np.ndarray) -> np.ndarray:
        return bits.view(np.float32)

    def bits(self, number: np.ndarray) -> np.ndarray:
        return number.view(np.uint32)

    def rounded_to(self, dtype: str, numbers: Sequence[np.ndarray]) -> np.ndarray:
        both = np.stack(list(numbers), axis=-1).astype(jnp.dtype(dtype))
        return np.ascontiguousarray(both).view(np.uint32)[:, 0]

    def halves(self, word: np.ndarray) -> list[np.ndarray]:
        both = np.ascontiguousarray(word).view(np.float16).reshape(-1, 2).astype(np.float32)
        return [np.ascontiguousarray(both[:, half]) for half in range(2)]


class Warpgroup(Numbers, Lanes):
    """The threads with shared and device memory, and the instructions on whole warps as PTX defines them.

    A word is `[threads, 2]`, numbers of 16 bits.
    """

    def __init__(self, dtype: np.dtype, shared: int, device: np.ndarray):
        super().__init__()
        self.dtype, self.shared = dtype, np.full(shared, 0xFF, np.uint8)
        self.device = device.reshape(-1).view(np.uint8)

    def distance(self, index: Any, size: int) -> Any:
        return index.astype(np.int32).astype(np.int64) * size

    def copy_chunk(self, target: Any, source: Any, offsets: tuple[int, int], size: Any, condition: Any = None) -> None:
        given = np.full(THREADS, True) if condition is None else condition
        addresses = target.astype(int) + offsets[0], source + offsets[1], size
        for to, start, count in np.stack(addresses, axis=-1)[given]:
            assert to % 16 == start % 16 == 0
            assert 0 <= to <= self.shared.size - 16
            self.shared[to : to + 16] = 0
            if count:
                assert 0 <= start <= self.device.size - count
                self.shared[to : to + count] = self.device[start : start + count]

    def load_words(self, address: Any, offset: int, count: int) -> list[np.ndarray]:
        places = np.broadcast_to(address, (THREADS,)).astype(int) + offset
        assert not (places % (4 * count)).any()
        assert ((places >= 0) & (places <= self.device.size - 4 * count)).all()
        words = self.device[places[:, None] + np.arange(4 * count)].view(np.uint32)
        return [np.ascontiguousarray(words[:, at]) for at in range(count)]

    def store_chunk(self, address: Any, offset: int, words: Sequence[Any], condition: Any = None) -> None:
        given = np.full(THREADS, True) if condition is None else condition
        places = (address.astype(int) + offset)[given]
        assert not (places % 16).any()
        assert ((places >= 0) & (places <= self.shared.size - 16)).all()
        self.shared[places[:, None] + np.arange(16)] = np.stack(words, axis=1)[given].view(np.uint8)

    def store_word(self, address: Any, offset: int, word: Any) -> None:
        places = address.astype(int) + offset
        assert not (places % 4).any()
        assert ((places >= 0) & (places <= self.shared.size - 4)).all()
        # Each warp's 32 words lie in different banks.
        banks = places.reshape(4, 32) // 4 % 32
        assert (np.sort(banks, axis=1) == np.arange(32)).all()
        self.shared[places[:, None] + np.arange(4)] = np.ascontiguousarray(word).view(np.uint8).reshape(THREADS, 4)

    def load_number(self, address: Any, offset: int) -> np.ndarray:
        """Each lane's float32 number of shared memory."""
        own = np.broadcast_to(address, (THREADS,)).astype(np.int64)[:, None] + offset + np.arange(4)
        return np.ascontiguousarray(self.shared[own]).view(np.float32)[:, 0]

    def store_in_row(self, address: Any, offset: int, words: Sequence[Any], condition: Any) -> None:
        places = address.astype(int) + offset
        assert not (places % 8).any()
        # Of each row, of which four threads have a part, 32 bytes.
        by_row = np.sort(places.reshape(-1, 4), axis=1)
        assert (by_row == by_row[:, :1] + 8 * np.arange(4)).all()
        given = np.stack(words, axis=1).view(np.uint8)
        assert ((places >= 0) & (places <= self.device.size - 8))[condition].all()
        self.device[places[condition][:, None] + np.arange(8)] = given[condition]

    def add_numbers(self, address: Any, offset: int, numbers: Sequence[Any]) -> None:
        size, device = 4 * len(numbers), self.device.view(np.float32)
        places = address.astype(int) + offset
        assert not (places % size).any()
        # What a warp adds to lies side by side.
        assert (np.sort(places.reshape(4, 32), axis=1) == places.reshape(4, 32).min(1)[:, None] + size * LANE).all()
        assert ((places >= 0) & (places <= self.device.size - size)).all()
        np.add.at(device, places[:, None] // 4 + np.arange(len(numbers)), np.stack(numbers, axis=-1))

    def numbers(self, pair: Any) -> list[np.ndarray]:
        return [pair[:, 0], pair[:, 1]]

    def load_matrices(self, address: Any, offset: int, *, transpose: bool) -> Sequence[np.ndarray]:
        places = address.astype(int)[:, None] + offset + np.arange(16)
        assert not (places[:, 0] % 16).any()
        # Warp, matrix, row, column.
        matrices = self.shared[places].view(self.dtype).reshape(4, 4, 8, 8)
        matrices = matrices.swapaxes(2, 3) if transpose else matrices
        # A lane has two neighbours of row lane / 4.
        return list(matrices.transpose(1, 0, 2, 3).reshape(4, THREADS, 2))

    def multiply(self, dtype: Any, factors: Sequence[tuple[Any, Any]], c: Sequence[Any]) -> list[np.ndarray]:
        # Quarters of 8 x 8: warp, row, pair, neighbour.
        quarter = lambda words: np.asarray(words, np.float32).reshape(4, 8, 8)
        before = np.concatenate([quarter(np.stack(c[at : at + 2], axis=-1)) for at in (0, 2)], axis=1)
        made = before if len(factors) == 1 else np.zeros_like(before)
        for a, b in factors:
            left = np.block([[quarter(a[0]), quarter(a[2])], [quarter(a[1]), quarter(a[3])]])
            # Of B a lane has two neighbours of column lane / 4.
            right = np.concatenate([quarter(word).swapaxes(1, 2) for word in b], axis=1)
            made = matrix_unit.add(made, left @ right)
        made = (made if len(factors) == 1 else before + made).reshape(4, 2, 8, 4, 2)
        return [made[:, half, :, :, neighbour].reshape(THREADS) for half in range(2) for neighbour in range(2)]
