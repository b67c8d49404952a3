"""The gradient of a bias that batch entries or heads share, by both families of kernels, in Pallas' interpreter."""

import dataclasses
from typing import Any

import cases
import hopper_kernels
import jax.numpy as jnp
import kernel_families
import oracle
import pytest
from cases import Case
from short_run import cover

from jflash._backends.nvidia.walk import dbias_schedule
from jflash._backends.nvidia.walk.dbias_schedule import DbiasSchedule

FAMILIES = {"Hopper": kernel_families.HOPPER, "mma": kernel_families.mma("8.0")}


def shared_bias(entries: int, heads: int, **options: Any) -> cases.Call:
    """A call of three batch entries and two heads, whose bias has `entries` batch entries and `heads` heads."""
    case = Case("bfloat16", 70, 72, heads=(2, 1), dims=(64, 64), batch=(3,), bias="full", **options)
    call = cases.build(case)
    return dataclasses.replace(call, bias=call.bias[:entries, :heads])


def schedule(call: cases.Call, family: kernel_families.Family, processors: int) -> DbiasSchedule:
    spec, _ = hopper_kernels.canonical(call, deterministic=True)
    return family.plans(spec, processors)[1][-1].plan.schedule


@cover(every=6)
@pytest.mark.parametrize(
    ("entries", "heads", "splits", "options"),
    [
        # Of 4 CTAs for 6 visits one has none, of 2 for 3 one has less.
        (1, 1, 4, dict(causal=True, lengths="both")),
        (1, 2, 2, dict(mask="full", soft_cap=1.5)),
        (3, 1, 2, dict(segments="sorted", dropout=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_a_tile_are_shared(name: str, entries: int, heads: int, splits: int, options: dict):
    call, family = shared_bias(entries, heads, **options), FAMILIES[name]
    processors = -(-schedule(call, family, 1).number * splits // 2)
    assert schedule(call, family, processors).splits == splits
    got = hopper_kernels.run(call, processors, family=family, detect_races=name == "Hopper", deterministic=True)
    oracle.assert_right(got, call)


@pytest.mark.parametrize("ctas", [None, 1, 7, 40, 1000])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (5, 1), (5, 4)])
def test_each_head_is_visited_once(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], ctas: int | None):
    """By the CTAs of a tile, and each by one."""
    bias = jnp.zeros((*shape, 100, 300), jnp.bfloat16)
    query, key = jnp.zeros((5, 100, 4, 64), jnp.bfloat16), jnp.zeros((5, 300, 4, 64), jnp.bfloat16)
    spec, _ = hopper_kernels.canonical_arguments(query=query, key=key, value=key, bias=bias)
    found = DbiasSchedule.of(spec, 64, 128, ctas)
    assert found.number == shape[0] * shape[1] * 2 * 3
    assert found.splits == max(1, min((ctas or 0) // found.number, found.visits))
    place = dict.fromkeys(("batch", "head", "split"), 0)
    monkeypatch.setattr(dbias_schedule, "cta_index", place.__getitem__)
    stored, visited = set(), []
    for place["batch"] in range(shape[0]):
        for place["head"] in range(shape[1]):
            for place["split"] in range(found.splits):
                stored.add(tuple(map(int, found.place())))
                first, count = map(int, found.own_visits())
                visited += [tuple(map(int, found.sharing(first + index))) for index in range(count)]
    assert len(stored) == shape[0] * shape[1] * found.splits
    assert max(stored) == (found.splits * shape[0] - 1, shape[1] - 1)
    assert sorted(visited) == [(batch, head) for batch in range(5) for head in range(4)]
