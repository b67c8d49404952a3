"""What a `score_mod` reads of the arrays that it closes over: one number at a time, at an index known before the logit.

    score_mod(logit, batch, head, query, key) = rest(logit, batch, head, query, key, array_0[index_0], ...)

A kernel loads the numbers of a tile, and then does the rest elementwise. A number that positions have no part in is one
for all of a tile; others are gathered from a table, which has to stay in the multiprocessor's cache. The gradients of
the former are sums over a head's logits, those of tables sums by index.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jflash._backends.nvidia.ops import Ref
from jflash._backends.nvidia.tile.inputs import KernelInputs, Loaded, TileCoord, shared_index
from jflash._semantics import program
from jflash._semantics.score_mod import ScoreMod, elementwise, values_of_64_bits
from jflash._semantics.spec import Operands, Spec
from jflash._semantics.tile import Tile

MOST_BYTES = 64 * 1024
"""Of a table."""

_DTYPES = (jnp.float32, jnp.int32, jnp.bool_)
_ARGUMENTS = ("logit", "batch", "head", "query", "key")
_POSITIONS = frozenset({"query", "key"})


@dataclasses.dataclass(frozen=True)
class _Part:
    """Part of an array: where it begins and how long it is along each axis, and which axes it still has."""

    array: int
    shape: tuple[int, ...]
    """The whole array's."""
    starts: tuple[Any, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @staticmethod
    def whole(array: int, shape: tuple[int, ...]) -> _Part:
        return _Part(array, shape, (0,) * len(shape), shape, tuple(range(len(shape))))

    def sliced(self, starts: Sequence[Any], sizes: Sequence[int], plus: Callable[[Any, Any, int], Any]) -> _Part:
        """A part of it; `plus` adds an index, which must not exceed a number, to a start."""
        own_starts, own_sizes = list(self.starts), list(self.sizes)
        for axis, start, size in zip(self.axes, starts, sizes, strict=True):
            own_starts[axis] = plus(own_starts[axis], start, own_sizes[axis] - size)
            own_sizes[axis] = size
        return dataclasses.replace(self, starts=tuple(own_starts), sizes=tuple(own_sizes))

    def squeezed(self, dimensions: Sequence[int]) -> _Part:
        return dataclasses.replace(self, axes=tuple(a for i, a in enumerate(self.axes) if i not in dimensions))


class _Evaluation(NamedTuple):
    """What is made of a score_mod's program, equation by equation."""

    compute: program.Rule
    """An equation between numbers."""
    plus: Callable[[Any, Any, int], Any]
    """As in `_Part.sliced`."""
    read: Callable[[_Part], Any]
    """A part that is one number."""
    refuse: Callable[[Any], list[Any]]
    """An equation that does something else with an array."""

    def __call__(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        rule = lambda equation, inputs: self._numbers(self._results(equation, inputs))
        return program.evaluate(jaxpr, self._numbers(consts), arguments, rule)

    def _numbers(self, values: Sequence[Any]) -> list[Any]:
        """The values, those parts read that are one number."""
        return [self.read(value) if isinstance(value, _Part) and not value.axes else value for value in values]

    def _results(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        operation, params = equation.primitive.name, equation.params
        if operation in ("jit", "pjit") and all(jnp.ndim(const) == 0 for const in params["jaxpr"].consts):
            return self(params["jaxpr"].jaxpr, params["jaxpr"].consts, inputs)
        first, *others = inputs or [None]
        if operation not in ("jit", "pjit") and not any(isinstance(value, _Part) for value in inputs):
            return self.compute(equation, inputs)
        if isinstance(first, _Part) and operation == "dynamic_slice":
            return [first.sliced(others, params["slice_sizes"], self.plus)]
        if isinstance(first, _Part) and operation == "slice" and params["strides"] is None:
            starts, stops = params["start_indices"], params["limit_indices"]
            return [first.sliced(starts, [b - a for a, b in zip(starts, stops, strict=True)], self.plus)]
        if isinstance(first, _Part) and operation == "squeeze":
            return [first.squeezed(params["dimensions"])]
        return self.refuse(equation)


class Read(NamedTuple):
    """One number of an array."""

    place: int
    """Among all reads."""
    array: int
    by_position: bool
    """Whether its index depends on query or key."""

    @property
    def name(self) -> str:
        """As of a parameter of logits."""
        return name(self.place)


def name(place: int) -> str:
    """Of a read, as of a parameter of logits."""
    return f"read_{place}"


@functools.lru_cache(maxsize=64)
def _analysis(score_mod: ScoreMod) -> tuple[tuple[Read, ...], str | None]:
    """What is read, and why it cannot be."""
    reads: list[Read] = []
    reasons: list[str] = []
    # A value here is the names of what it depends on.
    join = lambda *values: frozenset[str]().union(*(value for value in values if isinstance(value, frozenset)))

    def read(part: _Part) -> frozenset[str]:
        needs = join(*part.starts)
        if "logit" in needs:
            reasons.append("reads an array at an index that depends on the logit")
        if "array" in needs:
            reasons.append("reads an array at an index that it read from another")
        reads.append(Read(len(reads), part.array, not needs.isdisjoint(_POSITIONS)))
        return needs | {"array"}

    def refuse(equation: Any) -> list[Any]:
        reasons.append(f"does something else with an array than to take one number by its index: {equation.primitive}")
        return [frozenset[str]()] * len(equation.outvars)

    def compute(equation: Any, inputs: list[Any]) -> list[Any]:
        # Where indices are computed, all else is traced beside them, and Mosaic GPU lowers no such call.
        if score_mod.jaxpr.consts and equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            reasons.append("closes over arrays and calls a function with a derivative of its own")
        return [join(*inputs)] * len(equation.outvars)

    evaluation = _Evaluation(compute, lambda start, index, _: join(start, index), read, refuse)
    evaluation(score_mod.jaxpr.jaxpr, _parts(score_mod), [frozenset({name}) for name in _ARGUMENTS])
    for found in reads:
        array = score_mod.jaxpr.consts[found.array]
        if array.dtype not in _DTYPES:
            reasons.append(f"reads an array of {array.dtype}")
        if found.by_position and 4 * math.prod(array.shape) > MOST_BYTES:
            reasons.append(f"reads by position an array of more than {MOST_BYTES // 1024} KiB in float32")
    wide = values_of_64_bits(score_mod.jaxpr.jaxpr)
    reasons += [f"computes in {value.aval.dtype}; x.astype(logit.dtype) makes fewer bits of an x" for value in wide]
    return tuple(reads), reasons[0] if reasons else None


def unsupported(spec: Spec) -> str | None:
    """Why kernels cannot take a call's `score_mod`, in words for the user; `None`: they can."""
    if spec.score_mod is None:
        return None
    if (reason := _analysis(spec.score_mod)[1]) is not None:
        return f"it takes no score_mod that {reason}."
    if spec.deterministic and tables(spec):
        return (
            "with deterministic=True it takes no score_mod that reads by position: its gradient is summed in any order."
        )
    return None


def smooth(spec: Spec) -> list[Read]:
    """What is read of arrays that have a gradient."""
    if spec.score_mod is None:
        return []
    dtypes = [array.dtype for array in spec.score_mod.jaxpr.consts]
    return [read for read in _analysis(spec.score_mod)[0] if jnp.issubdtype(dtypes[read.array], jnp.inexact)]


def summed(spec: Spec) -> list[Read]:
    """Those whose gradients are sums over positions."""
    return [read for read in smooth(spec) if not read.by_position]


def of_tables(spec: Spec) -> list[Read]:
    """Those whose gradients are sums by index."""
    return [read for read in smooth(spec) if read.by_position]


def tables(spec: Spec) -> dict[str, int]:
    """What is read by position and has a gradient that is asked for: how many numbers, by name."""
    if spec.score_mod is None or "score_mod_arrays" in spec.undifferentiated:
        return {}
    shapes = [array.shape for array in spec.score_mod.jaxpr.consts]
    arrays = (read.array for read in of_tables(spec))
    return {_array_name(array): math.prod(shapes[array]) for array in arrays}


def prepare(arrays: Sequence[Array | None]) -> dict[str, Array]:
    """Arrays, or their tangents, as kernels take them, by name: `[#B, numbers]`."""
    prepared: dict[str, Array] = {}
    for index, array in enumerate(arrays):
        if array is not None:
            dtype = jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32
            prepared[_array_name(index)] = array.reshape(array.shape[0], -1).astype(dtype)
    return prepared


def load(inputs: KernelInputs, at: TileCoord, tile: Tile) -> tuple[Any, ...]:
    """All that a tile reads of the arrays of `inputs`: a tile of numbers, or one number; 0 where there is no array."""
    score_mod = inputs.spec.score_mod
    if score_mod is None:
        return ()

    def number(read: Read) -> Any:
        ref = inputs.refs.get(_array_name(read.array))
        if ref is None:
            return 0.0
        entry = shared_index(ref, at.batch, None)[0]
        index = _index(score_mod, read, tile)
        return inputs.ops.gather(ref.at[entry], index) if read.by_position else ref[entry, index]

    return tuple(map(number, _analysis(score_mod)[0]))


def add_to_tables(
    inputs: KernelInputs,
    at: TileCoord,
    loaded: Loaded,
    p: Array,
    cotangents: Mapping[str, Array],
    sums: Mapping[str, Ref],
) -> None:
    """Add the cotangents of what a tile reads by position, by the reads' names, to tables of sums by the arrays' names,
    if there are any.

    The indices are made of `at`. With an opaque zero in it they are not those of `load` to the compiler, which would
    keep a tile's in registers, or spill them. Where a probability is 0, what is read there counts for nothing.
    """
    if not sums:
        return
    assert inputs.spec.score_mod is not None
    tile = inputs.tile(at, p.shape, loaded)
    for read in of_tables(inputs.spec):
        numbers = jnp.where(p == 0, 0.0, cotangents[read.name])
        index = _index(inputs.spec.score_mod, read, tile)
        inputs.ops.add_by_index(sums[_array_name(read.array)], index, numbers)


def _index(score_mod: ScoreMod, read: Read, tile: Tile) -> Any:
    """Where in the flat array a tile's number is, or its numbers are."""

    def scalar(query: Any, batch: Any, head: Any, key: Any, ahead: Any, _: Any) -> Any:
        return _indices(score_mod, batch, head, query, key, ahead)[read.place]

    if not read.by_position:
        zero = jnp.int32(0)
        return scalar(zero, tile.batch, tile.head, zero, zero, ())
    query, key = tile.indices
    others: Any = tile.batch, tile.head, key, tile.key_minus_query
    return elementwise(scalar, query, others, ())


def _indices(score_mod: ScoreMod, batch: Any, head: Any, query: Any, key: Any, ahead: Any) -> list[Any]:
    """Of all reads, for one logit, of which the key is `ahead` of the query."""
    found: list[Any] = []

    def read(part: _Part) -> Any:
        strides = [math.prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
        found.append(sum((start * stride for start, stride in zip(part.starts, strides, strict=True)), jnp.int32(0)))
        return jnp.zeros((), score_mod.jaxpr.consts[part.array].dtype)

    logit = jnp.zeros((), score_mod.jaxpr.jaxpr.invars[0].aval.dtype)
    _values(score_mod, read, [logit, batch, head, query, key], ahead)
    return found


@dataclasses.dataclass(frozen=True)
class _Rest:
    """A `score_mod` of a logit, indices, and what is read, for one tile."""

    score_mod: ScoreMod
    ahead: Any

    def __call__(self, logits: Any, *others: Any) -> Any:
        *indices, reads = others

        def scalar(logit: Any, batch: Any, head: Any, query: Any, key: Any, ahead: Any, *more: Any) -> Any:
            remaining = iter(more[:-1])

            def read(part: _Part) -> Any:
                number, dtype = next(remaining), self.score_mod.jaxpr.consts[part.array].dtype
                return number != 0 if dtype == jnp.bool_ else jnp.asarray(number, dtype)

            (result,) = _values(self.score_mod, read, [logit, batch, head, query, key], ahead)
            return jnp.asarray(result, logit.dtype)

        return elementwise(scalar, logits, (*indices, self.ahead, *map(jnp.asarray, reads)), ())


def rest(spec: Spec, tile: Tile) -> Spec:
    """The call whose `score_mod`, of a tile's logits, takes what was read for its arrays."""
    if spec.score_mod is None:
        return spec
    of_reads: Any = _Rest(spec.score_mod, tile.key_minus_query)
    return dataclasses.replace(spec, score_mod=of_reads)


def gradients(spec: Spec, operands: Operands, sums: Mapping[str, Array]) -> tuple[Any, ...]:
    """Of the arrays, `None` of those that have none.

    `sums` has, as d_ and a read's name, what its gradients sum to for each row of a head, `[B, N, L]`: of reads that
    positions have no part in; and as d_ and the name of an array that is read by position, `[B, numbers]`, those sums.
    """
    totals: list[Any] = [None] * len(operands.score_mod_arrays)
    for place, array in enumerate(operands.score_mod_arrays):
        of_table = sums.get(f"d_{_array_name(place)}")
        if of_table is not None:
            totals[place] = of_table if array.shape[0] > 1 else of_table.sum(axis=0)
    for read in summed(spec):
        total = sums.get(f"d_{read.name}")
        if total is not None:
            array, index = operands.score_mod_arrays[read.array], _by_head(spec, operands, read)
            # Not a scatter, which may add in any order.
            is_read = index[..., None] == jnp.arange(math.prod(array.shape[1:]))
            found = jnp.where(is_read, total.sum(axis=2)[..., None], 0).sum(axis=1 if array.shape[0] > 1 else (0, 1))
            before = totals[read.array]
            totals[read.array] = found if before is None else before + found
    shaped = lambda total, like: total.reshape(like.shape).astype(spec.gradient_dtype(like.dtype))
    every = zip(totals, operands.score_mod_arrays, strict=True)
    return tuple(None if total is None else shaped(total, like) for total, like in every)


def _by_head(spec: Spec, operands: Operands, read: Read) -> Array:
    """Where in the flat array each head's number is, `[B, N]`."""
    assert spec.score_mod is not None
    assert operands.batch_index is not None
    assert operands.head_index is not None
    score_mod, zero = spec.score_mod, jnp.int32(0)
    shape = spec.batch, spec.heads
    one = lambda batch, head: jnp.asarray(_indices(score_mod, batch, head, zero, zero, zero)[read.place])
    batch, head = (jnp.broadcast_to(index, shape) for index in (operands.batch_index[:, None], operands.head_index))
    return jnp.broadcast_to(jax.vmap(jax.vmap(one))(batch, head), shape)


def _values(score_mod: ScoreMod, read: Callable[[_Part], Any], arguments: Sequence[Any], ahead: Any) -> list[Any]:
    """The program's results; the last two of its arguments are the query's and the key's index, the latter `ahead`."""
    query, key = score_mod.jaxpr.jaxpr.invars[-2:]

    def compute(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        if equation.primitive.name == "sub":
            # The compiler sees which elements of a tile have one difference, and makes once what follows from it.
            left, right = equation.invars
            if left is key and right is query:
                return [ahead]
            if left is query and right is key:
                return [-ahead]
        return program.apply(equation, inputs)

    def refuse(equation: Any) -> list[Any]:
        raise AssertionError(equation)

    plus = lambda start, index, most: start + lax.clamp(jnp.int32(0), jnp.asarray(index, jnp.int32), jnp.int32(most))
    evaluation = _Evaluation(compute, plus, read, refuse)
    return evaluation(score_mod.jaxpr.jaxpr, _parts(score_mod), arguments)


def _parts(score_mod: ScoreMod) -> list[_Part]:
    return [_Part.whole(index, array.shape) for index, array in enumerate(score_mod.jaxpr.consts)]


def _array_name(index: int) -> str:
    return f"score_mod_{index}"
