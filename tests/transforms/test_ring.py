"""Tests of which parts of a sequence each device has and sees: complete, without repeats, with as much work for all."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jflash import _ring, _sequence, _sequence_strategy
from jflash._ring import Ring, SequenceSplit
from jflash._semantics import visibility
from jflash._semantics.spec import Operands, Spec, shape_facts


@dataclasses.dataclass(frozen=True)
class Device(Ring):
    """A ring as one of its devices sees it."""

    index: int = 0

    @property
    def own(self) -> int:
        return self.index


def operands_of(length: int, heads: tuple[int, int] = (1, 1), dtype: Any = jnp.float32) -> Operands:
    array = lambda heads: jnp.zeros((1, length, heads, 8), dtype)
    return Operands(array(heads[0]), array(heads[1]), array(heads[1]))


def split_of(device: int, count: int, length: int, **options: Any) -> SequenceSplit:
    """Return the split as `device` sees it, of `length` queries and keys in all."""
    spec = Spec(**{**shape_facts(operands_of(length), None), "scale": 1.0, "query_offset": 0, **options})
    ring = Device(("x",), count, device)
    return SequenceSplit(spec, ring, ring)


def chunks(split: SequenceSplit, device: int) -> list[range]:
    """The positions of a device's runs."""
    length = split.lengths[0] // (1 + split.zigzag)
    firsts = [int(split.first(device, run, split.lengths[0])) for run in range(1 + split.zigzag)]
    return [range(first, first + length) for first in firsts]


def sees(split: SequenceSplit, query: int, key: int) -> bool:
    (left, right), position = split.call.bounds, query + split.call.query_offset
    return (left is None or position - left <= key) and (right is None or key <= position + right)


bound = st.none() | st.integers(0, 40)


@given(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([2, 6]), bound, bound, st.integers(-40, 40), st.booleans())
def test_every_pair_is_visited_once(
    count: int, each: int, left: int | None, right: int | None, offset: int, is_causal: bool
) -> None:
    """Every visible pair is visited once. What a pair says of itself is true, and steps that no query needs are not
    made."""
    window = None if left is right is None else (left, right)
    options = dict(window=window, query_offset=offset, is_causal=is_causal)
    visited: list[tuple[int, int]] = []
    needed = set[int]()
    for device in range(count):
        split = split_of(device, count, each * count, **options)
        own = chunks(split, device)
        for step in split.steps:
            source = (device - step) % count
            theirs = chunks(split, source)
            for pair in split.pairs(step, source):
                queries, keys = own[int(pair.queries)], theirs[int(pair.keys)]
                seen = [(query, key) for query, key in itertools.product(queries, keys) if sees(split, query, key)]
                visited += seen
                needed |= {step} if seen else set()
                assert not pair.all_visible or len(seen) == len(queries) * len(keys)
                assert not pair.same or queries == keys
    length = each * count
    every = [(q, k) for q, k in itertools.product(range(length), repeat=2) if sees(split, q, k)]
    assert sorted(visited) == every
    assert needed == (set(split.steps) if every else set())


def tiles_visited(split: SequenceSplit, step: int, block: int = 32) -> int:
    """Tiles that a backend would visit for one step of a device, by the spans of `visibility`."""
    device = split.queries.own
    length = split.lengths[0] // (1 + split.zigzag)
    part = operands_of(length)
    queries, keys = {"query": part.query}, {"key": part.key, "value": part.value}
    source, count = (device - step) % split.queries.count, 0
    for pair in split.pairs(step, source):
        spec, operands = _sequence.part_of(split, split.call, part, queries, keys, pair, source)
        for first in range(0, length, block):
            span = visibility.key_spans(spec, operands, 0, 1, first, block)
            count += -(-(int(span.stop) - int(span.start)) // block)
    return count


def test_all_devices_do_the_same_at_every_step() -> None:
    """Causal, in a zigzag. In chunks as they come, the last device would do fifteen times what the first does."""
    count, length = 8, 1024
    of = lambda **options: np.array(
        [
            [tiles_visited(split_of(device, count, length, is_causal=True, **options), step) for device in range(count)]
            for step in range(count)
        ]
    )
    zigzag = of()
    assert (zigzag[0] == zigzag[0, 0]).all()
    assert (zigzag[1:] == zigzag[1, 0]).all()
    in_order = of(bias_shape=(1, 1, length, length)).sum(axis=0)
    assert (zigzag.sum(axis=0) * count == in_order.sum()).all()
    assert in_order[-1] >= 12 * in_order[0]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_halves_come_back_where_they_were(count: int) -> None:
    """Devices trade back at the exit what they traded at the entry: their mirror images have the other halves."""
    for device in range(count):
        split = split_of(device, count, 12 * count, is_causal=True)
        assert split.zigzag
        low, high = chunks(split, device)
        assert low.start + high.stop == 12 * count
    owned = [run for device in range(count) for run in chunks(split_of(0, count, 12 * count, is_causal=True), device)]
    assert sorted(itertools.chain.from_iterable(owned)) == list(range(12 * count))


@pytest.mark.parametrize(
    ("length", "heads", "options", "name"),
    [
        (131072, (32, 8), dict(is_causal=True), "all_to_all"),
        (131072, (32, 4), dict(is_causal=True), "ring"),
        (131072, (12, 12), dict(is_causal=True, window=(4096, 0)), "ring"),
        (131072, (32, 4), dict(is_causal=True, sequence_strategy="gather"), "gather"),
        (16384, (64, 1), {}, "gather"),
    ],
    ids=["heads to divide", "too few heads", "window", "named", "one key head"],
)
def test_the_strategy_is_counted_or_named(length: int, heads: tuple[int, int], options: Any, name: str) -> None:
    split = split_of(0, 8, length, **options)
    found = _sequence_strategy.choose(split, *heads)
    assert found.name == name
    assert found.reason.startswith(name)


def test_a_strategy_that_cannot_serve_is_refused() -> None:
    split = split_of(0, 8, 64, sequence_strategy="all_to_all")
    with pytest.raises(ValueError, match=r"sequence_strategy.*K=4 and 8 devices"):
        _sequence_strategy.choose(split, 8, 4)


def test_costs_are_those_of_a_call_counted_by_hand() -> None:
    """Causal, 8 devices, 8 heads on 2 key heads of 64: bytes in bfloat16, two products of every visible pair."""
    count, length, heads, key_heads, dim = 8, 4096, 8, 2, 64
    call = dataclasses.replace(
        split_of(0, count, length, is_causal=True).call, head_dim=dim, value_dim=dim, dtype=np.dtype(jnp.bfloat16)
    )
    found = _sequence_strategy.costs(dataclasses.replace(split_of(0, count, length), call=call), heads, key_heads)
    chunk = length // count
    keys, queries = (2 * chunk * n * dim * 2 for n in (key_heads, heads))
    flops = 2 * 2 * dim * heads * length**2 / 2 / count
    assert found["ring"].received == 7 * keys + (queries + keys) / 2
    assert found["ring"].flops == pytest.approx(_sequence_strategy.PARTS * flops, rel=1e-2)
    assert found["gather"].received == 7 * keys
    assert found["gather"].flops == pytest.approx(flops * 15 / 8, rel=1e-2)
    assert "all_to_all" not in found
    with_heads_to_divide = _sequence_strategy.costs(dataclasses.replace(split_of(0, count, length), call=call), 32, 8)
    assert with_heads_to_divide["all_to_all"].received == 4 * (queries + keys) * 7 / 8


def test_no_ring_outside_of_a_shard_map() -> None:
    assert _ring.in_shard_map(split_of(0, 8, 64).call) is None
