"""The kernels of both families with `jax_enable_x64`, for those who compute in 64 bits elsewhere."""

from collections.abc import Iterator
from typing import Any

import cases
import hopper_kernels
import jax
import oracle
import pytest
from cases import Case
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from kernel_families import HOPPER, Family, mma
from plain_attention import Call
from short_run import cover

FAMILIES = {"hopper": HOPPER, "mma": mma("8.0")}
BASE = Case("bfloat16", 131, 200, heads=(2, 1), dims=(64, 64), batch=(2,))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable 64 bits in every thread: the interpreter runs a CTA's warpgroups in threads of its own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def programs(family: Family, call: Call) -> list[ClosedJaxpr]:
    """Return the programs of the forward, the backward, and the tangent of a family that has one."""
    tangents = [hopper_kernels.traced_tangent(call)] if family is HOPPER else []
    return [*hopper_kernels.traced(call, family=family), *tangents]


@cover(every=7, rest=2)
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, lengths="both", sinks=True),
        dict(bias="full", mask="full", segments="sorted", dropout=True),
        dict(bias="queries", alibi=True, scale="traced", soft_cap=1.5),
        dict(bias="keys", window=(40, 10), offset="each", score_mod="arrays"),
        dict(dtype="float32", dims=(128, 128), score_mod="indices"),
        dict(query_length=1, key_length=700, heads=(4, 2), lengths="keys", mask="keys"),
        dict(dims=(200, 256), causal=True, offset="end"),
    ],
    ids=str,
)
def test_programs_are_the_same(family: Family, options: dict[str, Any]):
    call = cases.build(BASE._replace(**options))
    want = list(map(str, programs(family, call)))
    with jax.enable_x64(True):
        assert list(map(str, programs(family, call))) == want


@cover(every=2)
def test_programs_lower(family: Family):
    """The programs are lowered, for which no GPU is needed."""
    call = cases.build(BASE._replace(causal=True, lengths="both", segments="far apart", score_mod="indices"))
    with jax.enable_x64(True):
        for closed in programs(family, cases.with_64_bits(call)):
            shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
            run = jax.jit(lambda *args, closed=closed: jaxpr_as_fun(closed)(*args))
            assert "mosaic_gpu" in run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


ROWS = [
    dict(query_length=40, key_length=17, dims=(8, 8), segments="far apart", score_mod="indices", bias="keys"),
    dict(key_length=128, causal=True, lengths="both", scale="traced", sinks=True, dropout=True),
    dict(key_length=120, bias="full", mask="full", alibi=True, soft_cap=1.5, segments="far apart"),
    dict(query_length=1, key_length=100, heads=(4, 2), lengths="keys", mask="keys"),
    dict(dtype="float32", query_length=40, key_length=17, window=(40, 10), offset="each", score_mod="indices"),
]


@cover(0, rest=3)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", ROWS, ids=str)
def test_right(family: Family, options: dict[str, Any]):
    """The kernels are right in the interpreter, where whatever may have 64 bits has them."""
    call = cases.build(BASE._replace(**options))
    wide = cases.with_64_bits(call)
    got = hopper_kernels.run(wide, family=family, detect_races=family is HOPPER)
    oracle.assert_right(got, call, as_tf32=call.query.dtype == "float32")


@cover(0)
@pytest.mark.usefixtures("x64")
def test_tangents_right():
    call = cases.build(BASE._replace(causal=True, bias="keys", score_mod="indices", segments="far apart", sinks=True))
    hopper_kernels.assert_tangents_right(call, oracle.draw_tangents(call))
