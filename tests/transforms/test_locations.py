"""Sharded calls compile: what each device runs names no line of Python, which XLA would look up in the wrong table."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from equations import equations
from jax.experimental import pallas as pl
from operands import assert_same
from sharded_compile import SPLITS
from short_run import cover

from jflash._locations import without_locations

PROGRAM = Path(__file__).parents[1] / "support" / "sharded_compile.py"


@cover(0, rest=2)
@pytest.mark.parametrize("split", SPLITS)
def test_compiles_within_30_seconds(split: str) -> None:
    """Every call compiles soon; where each device's program had locations, the compilation of some never ended."""
    # Not the optimisation level of the other tests, at which XLA leaves stack frames alone.
    environment = os.environ | dict(XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")
    command = [sys.executable, PROGRAM, split]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


@jax.custom_jvp
def cubed(x: jax.Array) -> jax.Array:
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, cotangent: (cotangent / 2,))


@jax.custom_batching.custom_vmap
def negated(x: jax.Array) -> jax.Array:
    return -x


@negated.def_vmap
def _(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return negated(x), in_batched[0]


def doubled(x: jax.Array) -> jax.Array:
    def kernel(x_ref, out_ref) -> None:
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def program(x: jax.Array) -> tuple[jax.Array, ...]:
    """An equation of each kind that holds a program of its own."""
    looped = jax.lax.while_loop(lambda state: state.sum() < 100, lambda state: cubed(state) + 1, x)
    scanned, outputs = jax.lax.scan(lambda carry, y: (jnp.sin(carry + y), halved(carry)), x[0], x)
    branched = jax.lax.cond(x.sum() > 0, jax.checkpoint(jnp.cos), negated, doubled(x))
    switched = jax.lax.platform_dependent(x, cpu=jnp.tanh, default=jnp.exp)
    return looped, scanned, outputs, branched, switched, jax.jit(cubed)(halved(negated(x)))


def test_only_one_call_has_a_location() -> None:
    x = jnp.arange(6.0).reshape(2, 3) / 6
    bare = without_locations(program)
    assert_same(tuple(jax.jit(bare)(x)), program(x))
    first, *inner = equations(jax.make_jaxpr(bare)(x).jaxpr)
    assert first.source_info.traceback is not None
    kinds = {equation.primitive.name for equation in inner}
    assert kinds >= {"while", "scan", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "pallas_call"}
    assert [equation for equation in inner if equation.source_info.traceback is not None] == []


def test_names_stay() -> None:
    """Profiles show them."""

    def named(x: jax.Array) -> tuple[jax.Array]:
        with jax.named_scope("scores"):
            return (jnp.sin(x),)

    lowered = jax.jit(without_locations(named)).lower(1.0)
    assert "scores/sin" in lowered.as_text(debug_info=True)


def test_program_used_twice_stays_one() -> None:
    """Copies of it would be compiled one by one."""

    @jax.jit
    def used(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * 2

    text = jax.jit(without_locations(lambda x: (used(used(used(x))),))).lower(1.0).as_text()
    assert text.count("func.func private @used") == 1
