"""The Metal backend on jax-graft's platform `mtl`: the same kernels, in a host callback.

No such platform is here. The CPU stands in for it, as far as jflash knows, and the emulator for the GPU; so this shows
what is said, what is launched, and that results and gradients are right, of which jax-graft has no part.
"""

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from equations import equations
from operands import ALL, PLAIN, assert_same, attend_and_pull_back, jit, served, stack
from short_run import cover

import jflash
from jflash import _platform
from jflash._platform import Platform
from jflash_metal import _ffi

MTL = Platform("mtl", "Apple M4", None)
CPU = Platform("cpu", "cpu", None)

attention = functools.partial(jflash.attention, implementation="metal")
in_callback = functools.partial(attend_and_pull_back, implementation="metal")


@pytest.fixture
def mtl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is an Apple GPU under jax-graft."""
    if _ffi.available() is not None:
        pytest.skip(f"metal: {_ffi.available()}")
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": MTL})


def callbacks(function: Any, *args: Any) -> int:
    """How many host callbacks a function makes."""
    return sum(each.primitive.name == "pure_callback" for each in equations(jax.make_jaxpr(function)(*args).jaxpr))


CASES = [
    Case("float32", 13, 37, (4, 2), (16, 24), (3,), causal=True, lengths="both", sinks=True, offset="each"),
    Case("bfloat16", 40, 17, (2, 2), (40, 40), (2,), bias="full", mask="full", soft_cap=1.5, window=(15, 5)),
    Case("float16", 13, 64, (2, 1), (64, 64), (), bias="keys", alibi=True, scale="traced", segments="sorted"),
]


@cover(0)
@pytest.mark.usefixtures("mtl")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    call = cases.build(case)
    oracle.assert_right(oracle.run(attention, call), call)


@cover(0)
@pytest.mark.usefixtures("mtl")
def test_exact_with_a_mask_function() -> None:
    """The function's lists and bits come to the callback as any operand does."""
    call = dataclasses.replace(
        cases.build(CASES[0]), mask_mod=lambda batch, head, query, key: (query + key) % 3 != batch
    )
    oracle.assert_right(oracle.run(attention, call), call)


@pytest.mark.usefixtures("mtl")
def test_forward_and_backward_are_a_callback_each() -> None:
    """One callback runs all kernels of a forward, another one all of a backward."""
    assert callbacks(lambda: attention(**PLAIN)) == 1
    assert callbacks(in_callback, PLAIN) == 2


@pytest.mark.usefixtures("mtl")
def test_the_same_bits_as_by_custom_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = served(ALL, "metal")
    by_callback = jit(in_callback)(operands)
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": CPU})
    # A new function, which JAX has not traced yet.
    in_custom_calls = lambda operands: in_callback(operands)
    assert callbacks(in_custom_calls, operands) == 0
    jax.tree.map(np.testing.assert_array_equal, by_callback, jit(in_custom_calls)(operands))


@cover(0)
@pytest.mark.usefixtures("mtl")
def test_transforms() -> None:
    several = [PLAIN, jax.tree.map(jnp.cos, PLAIN)]
    got = jit(jax.vmap(in_callback))(stack(several))
    assert_same(got, stack([jit(in_callback)(one) for one in several]))

    def gradient(implementation: str) -> Any:
        attend = functools.partial(jflash.attention, implementation=implementation)
        layer = jax.checkpoint(lambda x, _: (attend(x, PLAIN["key"], PLAIN["key"]), None))
        return jit(jax.grad(lambda query: jax.lax.scan(layer, query, length=2)[0].sum()))(PLAIN["query"])

    assert_same(gradient("metal"), gradient("reference"))


@pytest.mark.usefixtures("mtl")
def test_operands_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets the memory of the callback's arrays, and reads what an earlier kernel wrote where it is."""
    bound: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    run = _ffi.run

    def recorded(*args: Any) -> None:
        bound.append((list(args[-2]), list(args[-1])))
        run(*args)

    monkeypatch.setattr(_ffi, "run", recorded)
    jax.block_until_ready(jit(in_callback)(PLAIN))
    (_, _), *backward = bound
    assert len(backward) >= 2
    written = [array for _, results in bound for array in results]
    for operands, _ in bound:
        for array in operands:
            assert not array.flags.owndata or any(array is own for own in written)


@pytest.mark.usefixtures("mtl")
def test_what_a_launch_refuses() -> None:
    array = np.zeros(4, np.float32)
    for options, message in (
        (dict(grid=(-1, 1, 1)), "`grid` must not be negative"),
        (dict(threads=(1025, 1, 1)), "multiply to at most 1024"),
        (dict(parameters=bytes(4097)), "at most 4096 bytes"),
        (dict(source="kernel void other() {}", entry="test"), "no kernel of this name"),
    ):
        given: dict[str, Any] = dict(source="", entry="", grid=(1, 1, 1), threads=(1, 1, 1), parameters=b"") | options
        with pytest.raises(RuntimeError, match=message):
            _ffi.run(**given, operands=[array], results=[array])


@pytest.mark.usefixtures("mtl")
def test_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jflash.explain(**PLAIN) != jflash.explain(**PLAIN, implementation="metal")
    assert jflash.explain(**PLAIN).startswith("xla serves this call on mtl (Apple M4).")
    assert jflash.explain(**PLAIN, implementation="metal") == "metal serves this call on mtl (Apple M4)."
    monkeypatch.setattr(_ffi, "available", lambda: "it was not built.")
    assert "  metal: it was not built." in jflash.explain(**PLAIN, implementation="metal")


@pytest.mark.usefixtures("mtl")
def test_cpu_and_mtl_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac with jax-graft both platforms are there, and JAX decides when it lowers."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"mtl": MTL, "cpu": CPU})
    assert callbacks(lambda: attention(**PLAIN)) == 1
    lowered = jax.jit(lambda: attention(**PLAIN)).lower().as_text()
    assert "jflash_metal_launch" in lowered
    assert "callback" not in lowered
