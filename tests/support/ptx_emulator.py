"""Runs a kernel's PTX on arrays: the instructions that the kernels by `mma.sync` have, as the PTX ISA defines them.

A warp is an array of 32 lanes. It runs until a barrier; between two, the warps of a CTA run one after the other in an
order that is drawn. Asynchronous copies arrive as late as they may, and until then there is NaN in their place. So a
read that nothing orders after its copy, or a copy that nothing orders after a read, spoils the result. Reads and writes
outside of an array, a branch that lanes disagree on and an instruction that is not known are errors.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matrix_unit
import ml_dtypes
import numpy as np
from ptx_arithmetic import COMPARISONS, FLOATS, INTEGERS, PAIRS, PREDICATES, bits, number, typed, unsigned

LANES = np.arange(32)
GLOBAL, SHARED = 1 << 33, 2048
"""Where device memory and a CTA's shared memory begin."""
_GAP = 4096
_HALVES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


class Instruction(NamedTuple):
    """A line of PTX."""

    condition: str | None
    """A predicate's name, after "!" if it is negated."""
    parts: list[str]
    """The words of its name."""
    operands: list[str]


def run(
    ptx: str,
    grid: Sequence[int],
    arrays: Mapping[str, np.ndarray],
    results: Mapping[str, Any],
    order: Sequence[str],
    shared_bytes: int,
    *,
    warpgroups: int = 1,
    changed: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """A kernel's results, and arrays that it `changed`; `order` has the names of all arrays, as its parameters come."""
    kernel, memory = _Kernel(ptx), _Memory()
    unset = {name: np.full(result.shape, 0, result.dtype) for name, result in results.items()}
    for array in unset.values():
        array.reshape(-1).view(np.uint8)[:] = 0xFF
    places = {name: memory.place(array) for name, array in {**arrays, **unset}.items()}
    parameters = dict(zip(kernel.parameters, [places[name] for name in order], strict=True))
    grid = [1] * (3 - len(grid)) + list(grid)
    chosen = random.Random(0)
    for index in itertools.product(range(grid[-1]), range(grid[-2]), range(math.prod(grid[:-2]))):
        shared = np.full(shared_bytes, 0xFF, np.uint8)
        place = dict(zip("xyz", index, strict=True))
        warps = [_Warp(number, place, parameters, memory, shared) for number in range(4 * warpgroups)]
        running = [warp.run(kernel) for warp in warps]
        at_barrier = [True]
        while any(at_barrier):
            at_barrier = [next(one, False) for one in chosen.sample(running, len(running))]
            assert all(at_barrier) or not any(at_barrier)
    made = unset | {name: arrays[name] for name in changed}
    return {name: memory.read(places[name], array) for name, array in made.items()}


class _Kernel:
    """A kernel's instructions, where its labels are, and its parameters."""

    def __init__(self, ptx: str) -> None:
        entry = ptx[ptx.index(".entry") :]
        self.parameters = re.findall(r"\w+_param_\d+", entry[: entry.index(")")])
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for raw in re.split(r"\n\s*\.section", entry[entry.index("{") :])[0].splitlines():
            line = re.sub(r"//.*", "", raw).strip()
            if label := re.fullmatch(r"(\$?\w+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif found := re.fullmatch(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*);", line):
                operands = [text.strip() for text in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s{[][^,]*", found[3])]
                self.instructions.append(
                    Instruction(found[1], found[2].split("."), [text for text in operands if text])
                )


class _Memory:
    """Device memory: arrays with gaps between them."""

    def __init__(self) -> None:
        self.bytes, self.known = np.zeros(0, np.uint8), np.zeros(0, bool)

    def place(self, array: np.ndarray) -> int:
        """Where an array's copy begins."""
        start, size = self.bytes.size, array.nbytes
        gap = _GAP + -size % 256
        self.bytes = np.concatenate([self.bytes, np.zeros(size + gap, np.uint8)])
        self.known = np.concatenate([self.known, np.ones(size, bool), np.zeros(gap, bool)])
        if size:
            self.bytes[start : start + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return GLOBAL + start

    def read(self, place: int, like: np.ndarray) -> np.ndarray:
        start = place - GLOBAL
        return self.bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def index(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return the places of numbers of `size` bytes."""
        assert not (addresses % size).any(), "misaligned"
        index = (addresses - GLOBAL)[:, None] + np.arange(size)
        assert ((index >= 0) & (index < self.bytes.size)).all(), "out of bounds"
        assert self.known[index].all(), "out of bounds"
        return index


class _Warp:
    """32 lanes with their registers, by name: arrays of bits, and of booleans."""

    def __init__(
        self, number: int, index: Mapping[str, int], parameters: Mapping[str, int], memory: _Memory, shared: np.ndarray
    ) -> None:
        self.memory, self.shared, self.parameters = memory, shared, parameters
        self.registers: dict[str, np.ndarray] = {"%tid.x": (number * 32 + LANES).astype(np.uint32)}
        self.registers["%smid"] = np.zeros(32, np.uint32)
        self.registers |= {f"%ctaid.{axis}": np.full(32, at, np.uint32) for axis, at in index.items()}
        self.group: list[tuple[np.ndarray, ...]] = []
        self.groups: list[list[tuple[np.ndarray, ...]]] = []

    def run(self, kernel: _Kernel) -> Iterator[bool]:
        """Yields at barriers."""
        at = 0
        while True:
            one = kernel.instructions[at]
            at += 1
            holds = self._holds(one.condition)
            match one.parts[0]:
                case "bra":
                    assert holds.all() or not holds.any(), "lanes disagree on a branch"
                    at = kernel.labels[one.operands[0]] if holds.any() else at
                case "ret":
                    return
                case "bar":
                    if "warp" not in one.parts:  # The lanes of a warp are together always.
                        yield True
                case _:
                    self._step(one.parts, one.operands, holds)

    def _holds(self, condition: str | None) -> np.ndarray:
        if condition is None:
            return np.ones(32, bool)
        holds = self.registers[condition.lstrip("!")]
        return ~holds if condition.startswith("!") else holds

    def _step(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        own = getattr(self, f"_{parts[0]}", None)
        if own is not None:
            own(parts, operands, holds)
            return
        target, *sources = operands
        if parts[-1] == "pred":
            made = PREDICATES[parts[0]](*(self._predicate(source) for source in sources))
        elif parts[-1] in PAIRS:
            dtype = PAIRS[parts[-1]]
            made = FLOATS[parts[0]](*self._pairs(sources, dtype))
            made = np.ascontiguousarray(made.astype(dtype)).view(np.uint32)[:, 0]
        elif parts[-1] == "f32":
            made = bits(self._float(parts, [number(self._value(source, 32)) for source in sources]))
        else:
            made = self._integer(parts, sources)
        self._set(target, made, holds)

    def _set(self, name: str, values: np.ndarray, holds: np.ndarray) -> None:
        before = self.registers.get(name)
        self.registers[name] = values if before is None or holds.all() else np.where(holds, values, before)

    def _value(self, text: str, width: int) -> np.ndarray:
        """A register's bits, or a constant's."""
        if text in self.registers:
            return self.registers[text].astype(unsigned(width))
        if text.startswith("0f"):
            return np.full(32, int(text[2:], 16), np.uint32)
        number = SHARED if text.startswith("__dynamic_shmem") else int(text, 0)
        return np.full(32, number & ((1 << width) - 1), unsigned(width))

    def _predicate(self, text: str) -> np.ndarray:
        return self.registers[text] if text in self.registers else np.full(32, int(text) != 0)

    def _address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[]").partition("+")
        return self._value(base.strip(), 64).astype(np.int64) + int(offset or 0)

    # By the instruction's first word.

    def _ld(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        target, source = operands
        if parts[1].startswith("param"):
            self._set(target, np.full(32, self.parameters[source.strip("[]")], np.uint64), holds)
            return
        width, targets = int(parts[-1][1:]), _names(target)
        size = width // 8 * len(targets)
        if parts[1] == "shared":
            loaded = self.shared[self._chunks(self._address(source) - SHARED, size)]
        else:
            loaded = self.memory.bytes[self.memory.index(self._address(source), size)]
        found = np.ascontiguousarray(loaded).view(unsigned(width))
        for place, name in enumerate(targets):
            self._set(name, found[:, place], holds)

    def _st(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        width = int(parts[-1][1:])
        values = np.stack([self._value(name, width) for name in _names(operands[1])], axis=1).view(np.uint8)
        if parts[1] == "shared":
            addresses = self._address(operands[0])[holds] - SHARED
            self.shared[self._chunks(addresses, values.shape[1])] = values[holds]
            return
        index = self.memory.index(self._address(operands[0])[holds], values.shape[1])
        self.memory.bytes[index] = values[holds]

    def _red(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        assert "add" in parts
        values = np.stack([number(self._value(name, 32)) for name in _names(operands[1])], axis=1)
        index = self.memory.index(self._address(operands[0])[holds], 4 * values.shape[1])
        for where, numbers in zip(index, values[holds], strict=True):
            self.memory.bytes[where] = (self.memory.bytes[where].view(np.float32) + numbers).view(np.uint8)

    def _cp(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        match parts[2]:
            case "commit_group":
                self.groups.append(self.group)
                self.group = []
            case "wait_group":
                while len(self.groups) > int(operands[0]):
                    for copies in self.groups.pop(0):
                        self._arrive(*copies)
            case _:
                target, source = self._address(operands[0]) - SHARED, self._address(operands[1])
                size = int(operands[2])
                # The last operand says how many bytes are read from device memory; zeros fill the rest. Without it,
                # all of them are read.
                read = self._value(operands[3], 32)[holds].astype(int) if operands[3:] else np.full(holds.sum(), size)
                copies = target[holds], source[holds], read, size
                self.shared[self._chunks(copies[0], size)] = 0xFF
                self.group.append(copies)

    def _arrive(self, target: np.ndarray, source: np.ndarray, read: np.ndarray, size: int) -> None:
        self.shared[self._chunks(target, size)] = 0
        for to, start, count in zip(target, source, read, strict=True):
            if count:
                (index,) = self.memory.index(np.array([start]), count)
                self.shared[to : to + count] = self.memory.bytes[index]

    def _chunks(self, addresses: np.ndarray, size: int = 16) -> np.ndarray:
        assert not (addresses % size).any(), "misaligned"
        assert ((addresses >= 0) & (addresses <= self.shared.size - size)).all(), "outside of shared memory"
        return addresses[:, None] + np.arange(size)

    def _ldmatrix(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        matrices = self.shared[self._chunks(self._address(operands[1]) - SHARED)].view(np.uint16).reshape(4, 8, 8)
        matrices = matrices.swapaxes(1, 2) if "trans" in parts else matrices
        words = np.ascontiguousarray(matrices).reshape(4, 32, 2).view(np.uint32)[..., 0]
        self.registers.update(zip(_names(operands[0]), words, strict=True))

    def _mma(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        dtype = _HALVES[parts[-2]]
        a, b, c = ([self._value(name, 32) for name in _names(text)] for text in operands[1:])
        quarter = lambda words: words.view(np.uint16).view(dtype).astype(np.float64).reshape(8, 8)
        left = np.block([[quarter(a[0]), quarter(a[2])], [quarter(a[1]), quarter(a[3])]])
        right = np.concatenate([quarter(word).T for word in b])
        before = np.stack(list(map(number, c)), axis=-1).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        made = bits(matrix_unit.add(before, (left @ right).astype(np.float32))).reshape(2, 8, 4, 2)
        each = [made[half, :, :, neighbour].reshape(32) for half in range(2) for neighbour in range(2)]
        self.registers.update(zip(_names(operands[0]), each, strict=True))

    def _shfl(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        source = {"bfly": LANES ^ int(operands[2]), "idx": np.full(32, int(operands[2]))}[parts[2]]
        self.registers[operands[0]] = self._value(operands[1], 32)[source]

    def _elect(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        lane, is_elected = operands[0].split("|")
        self.registers[lane], self.registers[is_elected] = np.zeros(32, np.uint32), LANES == 0

    def _fence(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        """Nothing: what is written is seen."""

    def _vote(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        votes = self.registers[operands[1]]
        ballot = np.full(32, int(sum(1 << lane for lane in LANES[votes].tolist())), np.uint32)
        self.registers[operands[0]] = np.full(32, votes.all()) if parts[2] == "all" else ballot

    def _mov(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        target, source = operands
        if parts[-1] == "pred":
            self._set(target, self._predicate(source), holds)
            return
        width, names = int(parts[-1][1:]), _names(source if source.startswith("{") else target)
        if source.startswith("{"):
            halves = [self._value(name, width // len(names)) for name in names]
            self._set(target, np.stack(halves, axis=1).view(unsigned(width))[:, 0], holds)
            return
        halves = self._value(source, width)[:, None].view(unsigned(width // len(names)))
        for place, name in enumerate(names):
            self._set(name, halves[:, place], holds)

    def _cvta(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        self._set(operands[0], self._value(operands[1], 64), holds)

    def _cvt(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        to, source = parts[-2:]
        target, *texts = operands
        if to.endswith("x2"):
            high, low = (number(self._value(text, 32)).astype(_HALVES[to[:-2]]).view(np.uint16) for text in texts)
            made = np.stack([low, high], axis=1).view(np.uint32)[:, 0]
        elif to in _HALVES:
            made = number(self._value(texts[0], 32)).astype(_HALVES[to]).view(np.uint16)
        elif source in _HALVES:
            made = bits(self._value(texts[0], 16).view(_HALVES[source]).astype(np.float32))
        elif to == "f32":
            made = bits(typed(self._value(texts[0], 32), source).astype(np.float32))
        else:
            width = int(to[1:])
            made = typed(self._value(texts[0], int(source[1:])), source).astype(f"i{width // 8}").view(unsigned(width))
        self._set(target, made, holds)

    def _setp(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        target, *texts = operands
        if parts[-1] in PAIRS:
            both = COMPARISONS[parts[1]](*self._pairs(texts, PAIRS[parts[-1]]))
            for half, name in enumerate(target.split("|")):
                self._set(name, both[:, half], holds)
            return
        left, right = (typed(self._value(text, int(parts[-1][1:])), parts[-1]) for text in texts)
        self._set(target, COMPARISONS[parts[1]](left, right), holds)

    def _selp(self, parts: list[str], operands: list[str], holds: np.ndarray) -> None:
        target, yes, no, which = operands
        either = (self._value(text, int(parts[-1][1:])) for text in (yes, no))
        self._set(target, np.where(self.registers[which], *either), holds)

    # The others, by their type.

    def _pairs(self, texts: list[str], dtype: Any) -> list[np.ndarray]:
        """Each word as two numbers of 16 bits."""
        return [np.ascontiguousarray(self._value(text, 32)).view(dtype).reshape(-1, 2) for text in texts]

    @staticmethod
    def _float(parts: list[str], x: list[np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):
            if parts[0] in ("max", "min"):
                names = "maximum" if parts[0] == "max" else "minimum", f"f{parts[0]}"
                return getattr(np, names["NaN" not in parts])(*x)
            return np.asarray(FLOATS[parts[0]](*x), np.float32)

    def _integer(self, parts: list[str], sources: list[str]) -> np.ndarray:
        kind, width = parts[-1], int(parts[-1][1:])
        if not {"wide", "hi"}.isdisjoint(parts):
            values = [
                typed(self._value(text, width), kind).astype(f"{kind[0].replace('s', 'i')}{width // 4}")
                for text in sources
            ]
            product = np.multiply(*values)
            return (product >> width).astype(unsigned(width)) if "hi" in parts else product.view(unsigned(2 * width))
        values = [self._value(text, width) for text in sources]
        if parts[0] in ("shl", "shr"):
            by = np.minimum(values[1], unsigned(width)(width - 1)).astype(values[0].dtype)
            assert (values[1] < width).all()
            shift = np.left_shift if parts[0] == "shl" else np.right_shift
            return shift(typed(values[0], kind), typed(by, kind)).view(unsigned(width))
        with np.errstate(over="ignore"):
            made = INTEGERS[parts[0]](*(typed(value, kind) for value in values))
        return np.asarray(made).view(unsigned(width))


def _names(text: str) -> list[str]:
    """Return the names of one register or of several."""
    return [name.strip() for name in text.strip("{}").split(",")]
