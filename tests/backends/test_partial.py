"""A call of some of the queries with some of the keys, on every backend: what several devices make, and merge."""

import itertools
from collections.abc import Callable
from typing import Any

import cases
import hopper_kernels
import jax
import kernel_families
import oracle
import parts
import pytest
from cases import Case
from short_run import cover

from jflash import _dispatch, _platform
from jflash._semantics.spec import Spec

HALVED = [
    Case("bfloat16", 40, 64, (2, 1), (64, 64), causal=True, lengths="both", score_mod="indices"),
    Case("bfloat16", 40, 64, (1, 1), (256, 256), causal=True, offset="traced"),
    Case("float16", 40, 64, (4, 2), (40, 24), bias="keys", alibi=True, scale="traced", window=(15, 10), offset="each"),
    Case("bfloat16", 40, 64, (2, 2), (16, 16), bias="full", mask="full", segments="sorted", soft_cap=1.5),
    Case("float32", 40, 64, (2, 1), (16, 24), bias="queries", causal=True, offset="end", dropout=True),
    Case("bfloat16", 40, 64, (2, 2), (16, 24), bias="queries", causal=True, offset="end"),
    # One query, of which the Hopper kernels pack heads.
    Case("bfloat16", 2, 64, (4, 2), (24, 24), lengths="keys"),
]
EXACT = dict(precision="highest")
"""The precision in which float32 is held to its own rule on every backend."""
IN_SHORT_RUN = {
    "xla": HALVED[::4],
    "metal": HALVED[3:4],
    "reference": [],
    "mosaic_gpu": HALVED[:1],
    "mosaic_gpu_mma": [],
    "cudnn": [],
}
IN_INTERPRETER = {"mosaic_gpu": kernel_families.HOPPER, "mosaic_gpu_mma": kernel_families.mma("8.0")}
"""The interpreter takes ten seconds for most."""


@cover(rest=3)
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, marks=() if case in IN_SHORT_RUN[backend] else cover(0))
        for case, backend in itertools.product(HALVED, _dispatch.BACKENDS)
    ],
    ids=str,
)
def test_halves_make_the_whole(backend: str, case: Case):
    """Rounded once, in the end; and a gradient of a bias too is a sum of what each part gives."""
    call = cases.build(cases.served(case, backend))
    forward, backward = functions(backend, hopper_kernels.canonical(call, **EXACT)[0])
    oracle.assert_right(parts.run(call, forward, backward, **EXACT), call)


def functions(backend: str, spec: Spec) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A backend's forward and backward, Pallas kernels' in the interpreter; skips a call that it refuses."""
    own = _dispatch.BACKENDS[backend]
    family = IN_INTERPRETER.get(backend)
    own_reason = lambda: own.unsupported_call(spec) or getattr(own, "unsupported_backward", lambda _: None)(spec)
    reason = own.unsupported(spec, _platform.current()) if family is None else own_reason()
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    if family is not None:
        return hopper_kernels.functions(family=family)
    forward, _, backward = (jax.jit(function, static_argnums=0) for function in _dispatch.functions(backend, spec))
    return forward, backward
