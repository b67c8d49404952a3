"""The order in which CTAs of the fused backward add to dQ: it does not depend on which CTAs are fast."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from hopper_schedules import plan_fused, spec
from interpreter import Interpreter
from kernel_families import HOPPER, plan_of
from short_run import cover

from jflash._backends.mosaic_gpu import plan
from jflash._backends.mosaic_gpu.backward_fused import FusedCta, FusedPlan
from jflash._backends.mosaic_gpu.dq_accumulator import LINE, Place
from jflash._backends.mosaic_gpu.dq_order import OneOrder
from jflash._backends.nvidia.launch import Refs
from jflash._backends.nvidia.smem import Buffers
from jflash._backends.nvidia.tile.inputs import KernelInputs


class Numbers:
    """Counters in device memory, each of which is its number."""

    @property
    def at(self) -> "Numbers":
        return self

    def __getitem__(self, index: Any) -> Any:
        return index // LINE


class Walk(FusedCta):
    """A CTA's walk without its kernel."""

    def __init__(self, plan: FusedPlan, arrays: dict[str, Any], place: Place):
        self.plan, self.warpgroup, self.ops, self.smem = plan, 0, HOPPER.ops, Buffers()
        self.refs = Refs(arrays | dict(steps=Numbers()), {}, self.smem)
        self.inputs = KernelInputs(plan.spec, self.ops, arrays, keys_first=True)
        self._take_place(place)

    def step(self, step: Any) -> tuple[Any, ...]:
        """Return a step's head and first query, and how much has to be counted before it adds."""
        head, index = self.order.at(step, jnp.maximum(self.order.tiles.count, 1))
        return self.item.first_head + head, self.order.tiles.start(index), self.additions.least(step)


class Addition(NamedTuple):
    """What is added to the dQ of a batch entry and head, and how much of the CTA before has to be counted first."""

    target: tuple[int, int, int]
    least: int


class Program(NamedTuple):
    """What a CTA does: it counts what has arrived, all but what the last step added, and adds what a step makes."""

    counter: int
    before: int
    """The counter of the CTA before it."""
    additions: list[Addition]


def programs(plan: FusedPlan, arrays: dict[str, Any]) -> list[Program]:
    """The program of each CTA, in the order of tickets."""
    schedule, tile = plan.schedule, plan.tile
    places = list(itertools.product(range(schedule.waves), range(schedule.blocks), range(schedule.items)))
    steps = -(-plan.spec.query_length // tile.queries) * schedule.heads

    @jax.jit
    @jax.vmap
    def walked(place: Any) -> Any:
        walk = Walk(plan, arrays, Place(*place))
        counters = [walk.additions.counter(block) for block in (walk.additions.place.block, place[1] - 1)]
        count = walk.order.tiles.count * schedule.heads
        return count, walk.item.batch, *counters, jax.vmap(walk.step)(jnp.arange(steps))

    *facts, found = jax.tree.map(np.asarray, walked(jnp.array(places)))

    def program(cta: int) -> Program:
        count, entry, counter, before = (int(fact[cta]) for fact in facts)
        rows = [[int(part[cta][step]) for part in found] for step in range(count)]
        assert all(first % tile.queries == 0 for _, first, _ in rows)
        return Program(counter, before, [Addition((entry, head, first), least) for head, first, least in rows])

    return list(map(program, range(len(places))))


class Runs:
    """CTAs that begin in the order of tickets and go on in any; what is added arrives before it is counted."""

    def __init__(self, every: list[Program], processors: int, seed: int, *, waits: bool = True):
        self.every, self.generator, self.waits = every, np.random.default_rng(seed), waits
        self.counts: dict[int, int] = {}
        self.arrived: dict[tuple[int, ...], list[int]] = {}
        self._run(processors)

    def _run(self, processors: int) -> None:
        begins, resident = iter(range(len(self.every))), list[Iterator[bool]]()
        while True:
            for cta in itertools.islice(begins, processors - len(resident)):
                resident.append(self._walk(cta, self.every[cta]))
            if not resident:
                return
            # Some are slower than others, for a time.
            turns = [self.generator.choice([0, 0, 1, 2, 5]) for _ in resident]
            order = self.generator.permutation(len(resident))
            states = {place: [next(resident[place], None) for _ in range(turns[place])] for place in order}
            resident = [walk for place, walk in enumerate(resident) if None not in states[place]]
            went_on = any(state is not False for each in states.values() for state in each)
            assert went_on or self._may_go_on(resident), "a deadlock"

    def _may_go_on(self, resident: list[Iterator[bool]]) -> bool:
        """Whether some CTA can, though by chance none did."""
        return any(next(walk, True) for walk in resident)

    def _walk(self, cta: int, program: Program) -> Iterator[bool]:
        """Yield whether the CTA went on."""
        issued: list[tuple[int, ...]] = []
        for number in range(len(program.additions) + 2):
            # All but what the last step added.
            self._arrive(cta, issued, max(0, number - 1))
            self.counts[program.counter] = self.counts.get(program.counter, 0) + 1
            yield True
            if number >= len(program.additions):
                continue
            addition = program.additions[number]
            while self.waits and self.counts.get(program.before, 0) < addition.least:
                yield False
            issued.append(addition.target)
            yield True
            self._arrive(cta, issued, number + self.generator.choice(2))

    def _arrive(self, cta: int, issued: list[tuple[int, ...]], number: int) -> None:
        """Let what was issued in the first steps arrive, as many as this number."""
        for step, target in enumerate(issued[:number]):
            if target:
                self.arrived.setdefault(target, []).append(cta)
                issued[step] = ()


def lengths(*numbers: int) -> Any:
    return jnp.array(numbers, jnp.int32)


SQUARE = dict(batch=1, heads=2, key_heads=2, query_length=640, key_length=640)
CALLS: dict[str, tuple[dict, dict, int]] = {
    "full": (SQUARE, {}, 3),
    "causal": (SQUARE | dict(is_causal=True), {}, 3),
    "causal in waves": (SQUARE | dict(is_causal=True, batch=5), {}, 2),
    "causal, d128": (SQUARE | dict(is_causal=True, dims=128), {}, 3),
    "causal, d96 in turns": (SQUARE | dict(is_causal=True, dims=96), {}, 3),
    "causal, d80 in turns": (SQUARE | dict(is_causal=True, dims=80, batch=4), {}, 1),
    "causal, bottom right": (SQUARE | dict(is_causal=True, query_length=300, query_offset=340), {}, 3),
    "causal, negative offset": (SQUARE | dict(is_causal=True, query_offset=-201), {}, 3),
    "causal, offsets": (
        SQUARE | dict(is_causal=True, batch=2, query_offset=None),
        dict(query_offset=lengths(77, -130)),
        3,
    ),
    "window": (SQUARE | dict(window=(150, 70)), {}, 3),
    "window of the past in waves": (SQUARE | dict(window=(100, 0), batch=4), {}, 1),
    "narrow window": (SQUARE | dict(window=(10, 3), dims=128), {}, 3),
    "heads that share keys": (SQUARE | dict(is_causal=True, heads=8), {}, 1),
    "heads that share keys, full": (SQUARE | dict(heads=4, key_heads=1, dims=128), {}, 1),
    "heads that share keys, window": (SQUARE | dict(heads=4, window=(200, 0)), {}, 1),
    "lengths": (
        SQUARE | dict(is_causal=True, batch=3),
        dict(query_lengths=lengths(333, 640, 0), key_lengths=lengths(640, 201, 0)),
        3,
    ),
    "lengths, window, offset": (
        SQUARE | dict(window=(150, 30), batch=2, query_offset=90),
        dict(query_lengths=lengths(333, 640), key_lengths=lengths(640, 201)),
        2,
    ),
    "more queries than keys": (SQUARE | dict(query_length=1100, key_length=200), {}, 132),
    "more queries than keys, lengths": (
        SQUARE | dict(query_length=1100, key_length=400),
        dict(key_lengths=lengths(150)),
        132,
    ),
    "more queries than keys, causal": (SQUARE | dict(is_causal=True, query_length=1100, key_length=400), {}, 132),
    "partial": (SQUARE | dict(is_causal=True, partial=True, query_offset=70), {}, 3),
}


def planned(call: str) -> tuple[FusedPlan, dict[str, Any], int]:
    """The plan of a call that asks for one order, with what its kernel reads, and a number of processors."""
    facts, arrays, processors = CALLS[call]
    dim = facts.get("dims", 64)
    one = spec(dim, dim)
    asked = {name: value for name, value in facts.items() if name != "dims"}
    asked |= dict(operands=one.operands | frozenset(arrays), deterministic=True)
    fused = plan_fused(dataclasses.replace(one, **asked), processors)
    assert fused.schedule.in_order
    return fused, arrays, processors


@pytest.mark.parametrize("call", CALLS)
def test_every_tile_is_added_to_in_one_order(call: str):
    """Whatever CTAs are resident, and whichever of them are fast, they end and add to a tile in the same order."""
    fused, arrays, processors = planned(call)
    every = programs(fused, arrays)
    counters = [program.counter for program in every]
    assert len(set(counters)) == len(counters)
    assert max(counters) * LINE < OneOrder.size(fused.schedule)
    together = min(processors, 7)
    first, *others = [Runs(every, number, seed).arrived for seed, number in enumerate((together, together, 1, 40))]
    assert max(map(len, first.values())) > 1
    assert all(ctas == sorted(ctas) for ctas in first.values())
    assert all(other == first for other in others)
    # The same programs without their waits.
    assert any(Runs(every, 40, seed, waits=False).arrived != first for seed in range(9))


def test_splits_of_a_block_share_its_tiles_as_those_of_others_do():
    """A tile is in the same split of every block: where bounds let blocks see different tiles, none is split."""
    calls = [name for name in CALLS if name.startswith("more queries than keys")]
    splits = {name: planned(name)[0].schedule.splits for name in calls}
    assert all((number > 1) == ("causal" not in name) for name, number in splits.items()), splits


class Counting(Interpreter):
    """CTAs that count what they do. They run in the order of tickets, so that none has to wait."""

    def count_and_wait(self, counter: Any, before: Any, least: Any) -> None:
        del before, least
        counter[...] = counter[...] + 1


@cover(every=8, rest=2)
@pytest.mark.parametrize(
    ("processors", "lengths", "heads", "dims", "options"),
    [
        (1, (150, 270), (2, 2), (128, 128), dict(causal=True)),
        (1, (140, 270), (4, 1), (64, 64), dict(causal=True)),
        (132, (1100, 200), (1, 1), (64, 64), {}),
        (3, (150, 200), (2, 1), (40, 24), dict(alibi=True, sinks=True, scale="traced", causal=True, soft_cap=1.5)),
        # Of several waves.
        (4, (150, 270), (5, 5), (80, 80), dict(causal=True, offset="end")),
        (2, (140, 270), (1, 1), (96, 64), dict(window=(90, 20), lengths="both", batch=(3,))),
        (3, (150, 200), (4, 4), (64, 64), dict(bias="keys", dropout=True)),
        (3, (150, 200), (2, 2), (64, 64), dict(bias="full", window=(90, 20))),
    ],
    ids=str,
)
def test_what_is_added_is_counted(
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    options: dict,
):
    """A CTA of several that add to a tile's dQ counts every step, and what comes after the last one."""
    given = dict(dtype="bfloat16", batch=(1,)) | options
    call = cases.build(Case(query_length=lengths[0], key_length=lengths[1], heads=heads, dims=dims, **given))
    fused = plan_of(plan.plan_backward(hopper_kernels.canonical(call, deterministic=True)[0], processors), FusedPlan)
    assert fused is not None
    assert fused.schedule.blocks > 1
    made: list[Any] = []
    finish = FusedPlan.finish

    def keep(plan: FusedPlan, results: dict[str, Any], changed: Any) -> dict[str, Any]:
        jax.debug.callback(made.append, changed["steps"])
        return finish(plan, results, changed)

    monkeypatch.setattr(FusedPlan, "finish", keep)
    family = HOPPER._replace(interpreter=Counting)
    attend = functools.partial(hopper_kernels.run, call, processors, family=family, detect_races=False)
    oracle.assert_right(attend(deterministic=True), call)
    jax.effects_barrier()
    (steps,) = (np.asarray(steps).reshape(-1, LINE)[:, 0] for steps in made)
    most = -(-call.query.shape[1] // fused.tile.queries) * fused.schedule.heads
    assert steps.min() >= 2
    assert steps.max() == most + 2 or fused.schedule.splits > 1
    assert np.unique(steps).size > 1 or options.keys().isdisjoint({"causal", "window"})


@cover(every=3)
@pytest.mark.parametrize(
    ("dims", "heads", "options"),
    [((64, 64), (2, 1), dict(causal=True)), ((96, 96), (1, 1), {}), ((128, 128), (1, 1), dict(bias="keys"))],
    ids=str,
)
def test_no_race_of_a_cta_that_counts(dims: tuple[int, int], heads: tuple[int, int], options: dict):
    """One block of keys, as other CTAs that add to its dQ would be a race to the interpreter."""
    call = cases.build(Case("bfloat16", 140, 100, heads=heads, dims=dims, batch=(1,), **options))
    fused = plan_of(plan.plan_backward(hopper_kernels.canonical(call, deterministic=True)[0], 132), FusedPlan)
    assert fused is not None
    assert fused.schedule.in_order
    oracle.assert_right(hopper_kernels.run(call, deterministic=True), call)
