"""Tests of which backend serves a call, what is said about it, and how little a new one takes: one line of the
table."""

import functools
import itertools
import logging
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operands import assert_same, attend, attend_and_pull_back, draw, jit, loss, stack

import jflash
from jflash import _dispatch, _platform
from jflash._backends import reference
from jflash._platform import Platform
from jflash._semantics.spec import Operands, Residuals, Spec

QUERY, KEY, VALUE = (jax.random.normal(jax.random.key(seed), (2, 5, 2, 8)) for seed in range(3))
_names = (f"stub_{index}" for index in itertools.count())
"""Compiled calls are found again by the backend's name, so a stub has one that no other had."""


class Stub(types.SimpleNamespace):
    """A backend without a tangent: `reference`, and a record of the calls."""

    def __init__(self, refusal: str | None = None) -> None:
        super().__init__(refusal=refusal, asked=[], forwards=[], backwards=[])

    def unsupported(self, spec: Spec, platform: Platform) -> str | None:
        self.asked.append((spec, platform))
        return self.refusal

    def forward(self, spec: Spec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        self.forwards.append(spec)
        return reference.forward(spec, operands)

    def backward(self, spec: Spec, operands: Operands, residuals: Residuals) -> Operands:
        self.backwards.append(spec)
        leaves, tree = jax.tree.flatten(operands)
        smooth = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

        def forward(some: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            remaining = iter(some)
            merged = [next(remaining) if s else leaf for s, leaf in zip(smooth, leaves, strict=True)]
            return reference.forward(spec, jax.tree.unflatten(tree, merged))

        _, vjp = jax.vjp(forward, [leaf for s, leaf in zip(smooth, leaves, strict=True) if s])
        gradients = iter(vjp((residuals.d_out, residuals.d_lse))[0])
        return jax.tree.unflatten(tree, [next(gradients) if s else None for s in smooth])


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stub]:
    """One that refuses and two that serve, in front of the real backends."""
    table = {next(_names): Stub("it is a Tuesday."), next(_names): Stub(), next(_names): Stub()}
    monkeypatch.setattr(_dispatch, "BACKENDS", {**table, **_dispatch.BACKENDS})
    return table


@pytest.fixture
def served(stubs: dict[str, Stub]) -> tuple[str, Stub]:
    """The first that serves, with its name."""
    return list(stubs.items())[1]


def chosen(implementation: str | Sequence[str] | None) -> str:
    return jflash.explain(QUERY, KEY, VALUE, implementation=implementation).split()[0]


def test_first_that_serves(stubs: dict[str, Stub]) -> None:
    refusing, serving, other = stubs
    assert chosen(None) == serving
    assert chosen(other) == other
    assert chosen([refusing, other, serving]) == other
    assert chosen((serving, other)) == serving
    assert chosen("reference") == "reference"
    jflash.attention(QUERY, KEY, VALUE)
    jflash.attention(QUERY, KEY, VALUE, implementation=[other])
    assert [len(stub.forwards) > 0 for stub in stubs.values()] == [False, True, True]


def test_explain_names_choice_and_refusals(stubs: dict[str, Stub]) -> None:
    refusing, serving, _ = stubs
    machine = str(_platform.current())
    lines = [f"{serving} serves this call on {machine}.", f"  {refusing}: it is a Tuesday."]
    assert jflash.explain(QUERY, KEY, VALUE).splitlines() == lines
    assert jflash.explain(QUERY, KEY, VALUE, implementation=serving).splitlines() == lines[:1]
    lines[0] = f"No implementation can serve this call on {machine}."
    assert jflash.explain(QUERY, KEY, VALUE, implementation=refusing).splitlines() == lines
    assert stubs[refusing].asked[-1][1] == _platform.current()
    assert not any(stub.forwards for stub in stubs.values())


def test_all_refuse(stubs: dict[str, Stub]) -> None:
    refusing, serving, _ = stubs
    stubs[serving].refusal = "it is late."
    with pytest.raises(NotImplementedError) as caught:
        jflash.attention(QUERY, KEY, VALUE, implementation=[serving, refusing])
    assert str(caught.value).splitlines() == [
        "No implementation can serve this call.",
        f"  {serving}: it is late.",
        f"  {refusing}: it is a Tuesday.",
    ]


@pytest.mark.parametrize(
    "form", [np.asarray, lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)], ids=["numpy", "shape"]
)
def test_explain_takes_shapes(form: Any) -> None:
    """`explain` says the same for arrays and for descriptions of them, wherever an array can stand."""
    operands = draw()
    modulation, key = operands.pop("modulation"), operands.pop("dropout_key")
    segments = operands.pop("query_segments"), operands.pop("key_segments")
    arrays = {**operands, "segment_ids": segments}
    others = dict(
        is_causal=True,
        score_mod=lambda logit, batch, head, *_: logit + modulation[batch, head],
        dropout_rate=0.5,
        dropout_key=key,
    )
    described = jflash.explain(**jax.tree.map(form, arrays), **others)
    assert described == jflash.explain(**arrays, **others)
    assert described.splitlines()[0].endswith(f"serves this call on {_platform.current()}.")


def test_explain_inside_jit() -> None:
    said = []
    jax.jit(lambda query: said.append(jflash.explain(query, KEY, VALUE)))(QUERY)
    assert said == [jflash.explain(QUERY, KEY, VALUE)]


def test_third_backend_serves_every_transform(served: tuple[str, Stub]) -> None:
    """A backend only computes: JAX's derivatives are made around it, and a mapped axis is part of its batch."""
    name, stub = served
    operands = draw()
    function = functools.partial(attend_and_pull_back, implementation=name)
    reference = jit(functools.partial(attend_and_pull_back, implementation="reference"))
    assert_same(jit(function)(operands), reference(operands))
    assert {spec.batch for spec in (*stub.forwards, *stub.backwards)} == {2}

    stub.forwards.clear()
    stub.backwards.clear()
    several = [draw(seed) for seed in range(3)]
    assert_same(jit(jax.vmap(function))(stack(several)), stack([reference(one) for one in several]))
    assert stub.forwards[-1].batch == stub.backwards[-1].batch == 6


def test_what_a_backend_lacks_is_taken_from_xla(served: tuple[str, Stub]) -> None:
    """`xla` makes the tangent here, and every derivative beyond the first; the backend's own backward makes what is
    linear."""
    name, stub = served

    def derivatives(implementation: str) -> Any:
        scalar = lambda query: loss({"query": query, "key": KEY, "value": VALUE}, implementation)
        return jax.jvp(scalar, (QUERY,), (KEY,)), jax.jvp(jax.grad(scalar), (QUERY,), (KEY,))

    assert_same(jit(lambda: derivatives(name))(), jit(lambda: derivatives("reference"))())
    assert stub.forwards
    assert stub.backwards

    del stub.backwards[:]
    stub.tangent = lambda *_: (_ for _ in ()).throw(RuntimeError("its own tangent"))
    jax.clear_caches()
    with pytest.raises(RuntimeError, match="its own tangent"):
        derivatives(name)


def test_what_a_backend_has_may_depend_on_the_call(served: tuple[str, Stub]) -> None:
    name, stub = served
    stub.tangent = lambda *_: (_ for _ in ()).throw(RuntimeError("its own tangent"))
    stub.unsupported_tangent = lambda spec: "one query is too few" if spec.query_length == 1 else None

    def push(query: Any, implementation: str) -> Any:
        return jax.jvp(
            lambda query: attend({"query": query, "key": KEY, "value": VALUE}, implementation), [query], [query]
        )

    assert_same(*(push(QUERY[:, :1], implementation) for implementation in (name, "reference")))
    with pytest.raises(RuntimeError, match="its own tangent"):
        push(QUERY, name)
    last = jflash.explain(QUERY[:, :1], KEY, VALUE, implementation=name, verbose=True).splitlines()[-1]
    by_xla = f"tangent by xla ({name}: one query is too few)"
    assert last == f"derivatives: {by_xla}, backward by {name}, all others by xla"


def test_backend_of_a_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name, forward = next(_names), lambda *args: reference.forward(*args)
    alone = types.SimpleNamespace(unsupported=lambda spec, platform: None, forward=forward)
    monkeypatch.setattr(_dispatch, "BACKENDS", {name: alone, **_dispatch.BACKENDS})
    operands = draw()
    got, want = (jit(functools.partial(attend_and_pull_back, implementation=i))(operands) for i in (name, "reference"))
    assert_same(got, want)


def test_explain_says_whose_derivatives_are_taken(served: tuple[str, Stub]) -> None:
    name, _ = served
    last = lambda implementation: jflash.explain(
        QUERY, KEY, VALUE, implementation=implementation, verbose=True
    ).splitlines()[-1]
    assert last(name) == f"derivatives: tangent by xla, backward by {name}, all others by xla"
    assert last("xla") == "derivatives: all by xla"
    assert last("reference") == "derivatives: all by JAX, of the forward"


@pytest.mark.parametrize("function", ["unsupported", "forward", "backward"])
def test_errors_of_a_backend_are_not_caught(served: tuple[str, Stub], function: str) -> None:
    """A broken backend is an error, and no other one takes its place."""
    _, stub = served

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    setattr(stub, function, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        jax.grad(lambda query: attend({"query": query, "key": KEY, "value": VALUE}, None)[0].sum())(QUERY)


def test_empty_call_needs_no_kernel(served: tuple[str, Stub]) -> None:
    name, stub = served
    out, lse = attend({"query": QUERY, "key": KEY[:, :0], "value": VALUE[:, :0]}, name)
    assert_same((out, lse), (jnp.zeros_like(QUERY), jnp.full((2, 5, 2), -jnp.inf)))
    assert not stub.forwards


def test_choice_is_logged(stubs: dict[str, Stub], caplog: pytest.LogCaptureFixture) -> None:
    """The choice is logged for those who ask: nothing below a warning is shown by default, and there is no warning."""
    _, serving, _ = stubs
    with caplog.at_level(logging.DEBUG, "jflash"):
        jflash.attention(QUERY, KEY, VALUE)
    (record,) = [record for record in caplog.records if record.name == "jflash"]
    assert record.levelno == logging.DEBUG
    assert f"{serving} serves" in record.getMessage()
    assert "it is a Tuesday." in record.getMessage()
    assert logging.getLogger("jflash").handlers == []


def test_platform_follows_default_device() -> None:
    device = jax.devices()[1]
    with jax.default_device(device):
        assert _platform.current().name == device.platform
    with jax.default_device("cpu"):
        assert _platform.current().name == "cpu"
