"""What a plain call's gradient costs before its first result: programs that are traced, lowered and compiled.

Python takes about as long for an equation of a kernel as for any other. Bounds are what was found, and some room.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from equations import equations
from h200 import H200

import jflash
from jflash import _dispatch, _platform

LAYER = (2, 2048, 8, 128)


def gradient(implementation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program of a call's gradient; kernels' as if JAX's only device were a GPU."""
    if implementation != "xla":
        monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cuda": H200})

    def loss(*arrays: jax.Array) -> jax.Array:
        return jflash.attention(*arrays, is_causal=True, implementation=implementation).astype(jnp.float32).sum()

    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3)


@pytest.mark.parametrize(
    ("implementation", "most_kernels", "most_equations"),
    [("mosaic_gpu", 3, 1240), ("mosaic_gpu_mma", 3, 620), ("xla", 0, 1040)],
)
def test_bound_of_kernels_and_equations(
    implementation: str, most_kernels: int, most_equations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [equation.primitive.name for equation in equations(gradient(implementation, LAYER, monkeypatch).jaxpr)]
    assert made.count("jflash") >= 3
    assert made.count("mpmd_map") <= most_kernels
    assert (made.count("mpmd_map") > 0) == (most_kernels > 0), "Pallas calls its kernels by another name"
    assert len(made) <= most_equations


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_gpu_mma", "xla"])
def test_reverse_mode_traces_no_tangent(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reverse mode would make a tangent only to transpose it."""
    traced: list[str] = []
    for name in ("mosaic_gpu", "xla"):
        monkeypatch.setattr(_dispatch.BACKENDS[name], "tangent", lambda *_, name=name: traced.append(name))
    gradient(implementation, (1, 192, 2, 64), monkeypatch)
    assert not traced
