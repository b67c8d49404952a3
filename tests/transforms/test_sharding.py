"""Attention over eight devices: batch and heads split without gathering, anything else still right.

Indices (of dropout and `score_mod`) and sums are those of the whole problem: results are compared with one device's.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from operands import (
    ALL,
    PLAIN,
    SMOOTH,
    Operands,
    assert_same,
    attend,
    attend_and_pull_back,
    collectives,
    draw,
    jit,
    pull_back,
    reference,
    served,
)
from short_run import cover

import jflash

P = PartitionSpec

AXES: dict[str, tuple[int | None, int | None]] = {
    "query": (0, 2), "key": (0, 2), "value": (0, 2), "bias": (0, 1), "mask": (0, 1), "alibi_slopes": (None, 0),
    "sinks": (None, 0), "query_seq_lengths": (0, None), "key_value_seq_lengths": (0, None),
    "query_offset": (0, None), "query_segments": (0, None), "key_segments": (0, None),
}  # fmt: skip
"""The axes on which each operand has its batch and its heads; operands not here are whole on every device."""


class Layout(NamedTuple):
    """The mesh axes (of a 2 by 4 mesh "x", "y") over which batch and heads are split, for this many heads."""

    batch: Any
    heads: Any
    counts: tuple[int, int] = (8, 4)

    def draw(self, names: Iterable[str]) -> Operands:
        operands = draw(batch=8, heads=self.counts[0], key_heads=self.counts[1])
        return {name: operands[name] for name in names}

    def spec(self, name: str, array: jax.Array) -> PartitionSpec:
        """Return how one operand is split: as far as it has the axes."""
        axes: list[Any] = [None] * array.ndim
        for axis, mesh_axes in zip(AXES.get(name, (None, None)), self, strict=False):
            if axis is not None and array.shape[axis] > 1:
                axes[axis] = mesh_axes
        return P(*axes)

    def shared(self, operands: Operands) -> int:
        """Over how many splits the gradients of operands have to be summed, because all parts used them."""
        count = 0
        for name in SMOOTH:
            if name in operands:
                spec = [axis for axis in self.spec(name, operands[name]) if axis is not None]
                count += sum(axes is not None and axes not in spec for axes in (self.batch, self.heads))
        return count


LAYOUTS = {
    "batch": Layout("x", None),
    "batch_2d": Layout(("x", "y"), None),
    "heads": Layout(None, "y"),
    "batch_heads": Layout("x", "y"),
    "heads_batch": Layout("y", "x"),
    "multi_head": Layout("x", "y", (4, 4)),
    "multi_query": Layout(None, "y", (8, 1)),
    "multi_query_2d": Layout(None, ("x", "y"), (8, 1)),
    "multi_query_batch": Layout("x", "y", (8, 1)),
}


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def marked(*short: Any, slow: Iterable[Any]) -> list[Any]:
    """Values of which the short run takes the first."""
    return [*short, *(pytest.param(value, marks=cover(0)) for value in slow)]


def put(operands: Operands, layout: Layout, mesh: Mesh) -> Operands:
    return {
        name: jax.device_put(array, NamedSharding(mesh, layout.spec(name, array))) for name, array in operands.items()
    }


def check(layout: Layout, operands: Operands, backend: str) -> None:
    """Forward nothing moves between devices; backward only the sums of gradients of what they share."""
    operands = served(operands, backend)
    on_devices = put(operands, layout, mesh())
    forward = jit(functools.partial(attend, implementation=backend)).lower(on_devices).compile()
    both = jit(functools.partial(attend_and_pull_back, implementation=backend)).lower(on_devices).compile()
    assert collectives(forward) == []
    moved = collectives(both)
    assert set(moved) <= {"all-gather", "all-reduce"}
    assert len(moved) <= layout.shared(operands)

    got = both(on_devices)
    for result in got[0]:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh(), P(layout.batch, None, layout.heads)), result.ndim)
    assert_same(got, reference(operands))


@cover(1, rest=2)
@pytest.mark.parametrize(
    "layout",
    marked(
        *("batch_2d", "heads_batch", "multi_query"),
        slow=("batch", "heads", "batch_heads", "multi_head", "multi_query_2d", "multi_query_batch"),
    ),
)
def test_sharded_jit(split_backend: str, layout: str) -> None:
    check(LAYOUTS[layout], LAYOUTS[layout].draw(PLAIN), split_backend)


@cover(1, rest=2)
@pytest.mark.parametrize("layout", marked("batch_heads", "multi_query_2d", slow=("batch_2d", "heads")))
def test_all_operands(split_backend: str, layout: str) -> None:
    check(LAYOUTS[layout], LAYOUTS[layout].draw(ALL), split_backend)


@cover(every=2)
@pytest.mark.parametrize("layout", marked("multi_query_batch", slow=["batch_heads"]))
def test_inside_set_mesh(split_backend: str, layout: str) -> None:
    with jax.set_mesh(mesh()):
        check(LAYOUTS[layout], LAYOUTS[layout].draw((*PLAIN, "bias", "sinks")), split_backend)


@cover(1, rest=2)
@pytest.mark.parametrize("shape", marked((1, 8, 5, 1), (8, 1, 1, 7), slow=[(8, 8, 5, 7), (1, 1, 5, 7)]), ids=str)
def test_bias_of_any_shape(split_backend: str, shape: tuple[int, ...]) -> None:
    layout = LAYOUTS["batch_heads"]
    check(layout, {**layout.draw(PLAIN), "bias": jax.random.normal(jax.random.key(0), shape)}, split_backend)


def gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *arrays: jnp.sin(function(*arrays)).sum(), argnums=tuple(range(len(arrays))))(*arrays)


@cover(every=2)
def test_several_batch_axes(split_backend: str) -> None:
    """Each over its own mesh axis, as for data-parallel groups."""
    operands = LAYOUTS["batch"].draw(PLAIN)
    operands = [array.reshape(2, 4, *array.shape[1:]) for array in operands.values()]
    on_devices = jax.device_put(operands, NamedSharding(mesh(), P("x", "y")))
    call = functools.partial(jflash.attention, implementation=split_backend)
    compiled = jit(lambda *arrays: (call(*arrays), gradients(call, *arrays))).lower(*on_devices).compile()
    assert collectives(compiled) == []
    plain = functools.partial(jflash.attention, implementation="reference")
    assert_same(compiled(*on_devices), jit(lambda *arrays: (plain(*arrays), gradients(plain, *arrays)))(*operands))


@cover(1, rest=2)
@pytest.mark.parametrize(
    ("counts", "specs"),
    [
        ((8, 2), (P(None, None, "y"), P(), P())),
        ((8, 4), (P(None, None, ("x", "y")), P(), P())),
        ((12, 6), (P("x", None, "y"), P("x"), P("x"))),
        pytest.param((8, 2), (P("y", None, "x"), P("x", None, None, "y"), P("y")), marks=cover(0)),
        pytest.param((8, 4), (P(), P(None, None, "y"), P(None, None, "y")), marks=cover(0)),
    ],
    ids=["more_devices_than_key_heads", "on_two_axes", "indivisible_key_heads", "head_dims", "keys_alone"],
)
def test_other_splits(split_backend: str, counts: tuple[int, int], specs: tuple[PartitionSpec, ...]) -> None:
    """Other splits may have to gather, but not to fail."""
    operands = draw(batch=8, heads=counts[0], key_heads=counts[1])
    operands = {name: operands[name] for name in PLAIN}
    on_devices = {
        name: jax.device_put(array, NamedSharding(mesh(), spec))
        for (name, array), spec in zip(operands.items(), specs, strict=True)
    }
    got = jit(functools.partial(attend_and_pull_back, implementation=split_backend))(on_devices)
    assert_same(got, reference(operands))


@cover(1)
@pytest.mark.parametrize("spec", [P(None, "y"), P("y")], ids=["sequence", "indivisible_batch"])
def test_constraints_inside(split_backend: str, spec: PartitionSpec) -> None:
    """Splits that the program itself asks for, of 6 examples or 6 tokens over 4 devices."""
    arrays = [jax.random.normal(jax.random.key(seed), (6, 6, 2, 8)) for seed in range(3)]

    def call(implementation: str, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = jax.lax.with_sharding_constraint(query, NamedSharding(mesh(), spec))
        return jflash.attention(query, key, value, is_causal=True, implementation=implementation)

    results = [
        jit(functools.partial(gradients, functools.partial(call, name)))(*arrays)
        for name in (split_backend, "reference")
    ]
    assert_same(*results)


@cover(every=2)
def test_vmap_of_a_split_axis(split_backend: str) -> None:
    """The mapped axis is split like a batch axis; what it shares is not gathered."""
    operands = LAYOUTS["batch"].draw(PLAIN)
    in_axes = ({"query": 0, "key": 0, "value": 0},)
    function = jit(jax.vmap(functools.partial(attend_and_pull_back, implementation=split_backend), in_axes))
    on_devices = put(operands, LAYOUTS["batch_heads"], mesh())
    compiled = function.lower(on_devices).compile()
    assert collectives(compiled) == []
    expected = jit(jax.vmap(functools.partial(attend_and_pull_back, implementation="reference"), in_axes))(operands)
    assert_same(compiled(on_devices), expected)


def mapped(layout: Layout, operands: Operands, backend: str, **options: Any) -> Callable[[Operands], Any]:
    """Each device calls attention on its part, as if there was no other."""
    specs = {name: layout.spec(name, array) for name, array in operands.items()}
    return jax.shard_map(
        functools.partial(attend, implementation=backend),
        mesh=mesh(),
        in_specs=({**specs, "modulation": P(layout.batch, layout.heads)} if "modulation" in specs else specs,),
        out_specs=P(layout.batch, None, layout.heads),
        **options,
    )


@cover(1, rest=2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", marked("batch_heads", "multi_query_batch", slow=("batch_2d", "heads")))
def test_shard_map(split_backend: str, layout: str, check_vma: bool) -> None:
    """Results are right for all options but dropout, whose indices then count each part from 0."""
    layout = LAYOUTS[layout]
    operands = layout.draw(ALL.keys() - {"dropout_key"} - ({"modulation"} if check_vma else set()))
    operands = served(operands, split_backend)
    local = mapped(layout, operands, split_backend, check_vma=check_vma)
    assert_same(jit(functools.partial(pull_back, local))(put(operands, layout, mesh())), reference(operands))


def test_score_mod_in_shard_map_says_what_it_needs(split_backend: str) -> None:
    layout = LAYOUTS["batch_heads"]
    operands = layout.draw((*PLAIN, "modulation"))
    with pytest.raises(NotImplementedError, match=r"`score_mod`.*check_vma=False"):
        mapped(layout, operands, split_backend)(operands)


@cover(every=2)
def test_shard_map_over_some_axes(split_backend: str) -> None:
    """The batch split by hand, the heads by the compiler."""
    operands = LAYOUTS["batch"].draw(ALL.keys() - {"dropout_key", "modulation"})
    on_devices = put(operands, LAYOUTS["batch_heads"], mesh())
    local = mapped(LAYOUTS["batch"], operands, split_backend, axis_names={"x"})
    # A kernel is one operation to the compiler, which gathers for it; only plain JAX it can split.
    if split_backend == "xla":
        assert collectives(jit(local).lower(on_devices).compile()) == []
    assert_same(jit(functools.partial(pull_back, local))(on_devices), reference(operands))


@cover(1, rest=2)
@pytest.mark.parametrize("set_mesh", [False, True], ids=["plain", "set_mesh"])
@pytest.mark.parametrize("names", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("layout", ["batch_heads", "multi_query"])
def test_explicit_mesh(split_backend: str, layout: str, names: Iterable[str], set_mesh: bool) -> None:
    """`jax.make_mesh` makes such meshes by default: there, shardings are part of the arrays' types."""
    layout = LAYOUTS[layout]
    operands = served(layout.draw(names), split_backend)
    explicit = mesh(AxisType.Explicit)
    on_devices = put(operands, layout, explicit)
    with jax.set_mesh(explicit) if set_mesh else contextlib.nullcontext():
        results, gradients = jit(functools.partial(attend_and_pull_back, implementation=split_backend))(on_devices)
    for result in results:
        assert jax.typeof(result).sharding.spec[:3] == (layout.batch, None, layout.heads)
    for name, gradient in gradients.items():
        assert jax.typeof(gradient) == jax.typeof(on_devices[name])
    assert_same((results, gradients), reference(operands))
