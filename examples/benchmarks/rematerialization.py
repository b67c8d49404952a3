"""What `jax.checkpoint` saves and costs in a stack of transformer layers, by what it keeps of attention.

    python examples/benchmarks/rematerialization.py                       # on an NVIDIA GPU
    python examples/benchmarks/rematerialization.py --tokens 2048 --width 512 --layers 4 --dtype float32

Value and gradients of pre-norm layers (causal attention, then a gated MLP of four widths) in a `jax.lax.scan`. All ways
are compiled first, and then run in turns; times are medians, by the wall clock. Memory is what XLA plans beside the
arguments and results, on the device and, for what is offloaded, on the host. examples/rematerialization.md has what it
printed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from rich.console import Console
from rich.table import Table

import jflash

NAMES = jflash.RESIDUAL_CHECKPOINT_NAMES
HEAD_DIM = 128
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def checkpoint(policy: Any) -> Wrap:
    """Inside a scan JAX needs no barrier against common subexpressions."""
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)


def offload() -> Any:
    """Both residuals go to the host's memory and come back."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[*NAMES],
        offload_src="device",
        offload_dst="pinned_host",
    )


WAYS: dict[str, Wrap] = {
    "nothing": checkpoint(None),
    "output and log-sum-exp": checkpoint(jax.checkpoint_policies.save_only_these_names(*NAMES)),
    "both, on the host": checkpoint(offload()),
    "everything": lambda layer: layer,
}
"""By what is kept of a layer besides its inputs."""


class Step(NamedTuple):
    """A compiled value and gradient."""

    run: Callable[[], Any]
    device_bytes: int
    host_bytes: int


def layer(inputs: Array, weights: dict[str, Array]) -> tuple[Array, None]:
    """[tokens, width] of one sequence."""
    heads = lambda array: array.reshape(len(array), -1, HEAD_DIM)
    query, key, value = (heads(_normalised(inputs) @ weights[name]) for name in ("query", "key", "value"))
    attended = jflash.attention(query, key, value, is_causal=True)
    inputs = inputs + attended.reshape(inputs.shape) @ weights["out"]
    gate, up = (_normalised(inputs) @ weights[name] for name in ("gate", "up"))
    return inputs + (jax.nn.silu(gate) * up) @ weights["down"], None


def _normalised(inputs: Array) -> Array:
    wide = inputs.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + 1e-6)).astype(inputs.dtype)


def prepared(wrap: Wrap, inputs: Array, weights: dict[str, Array]) -> Step:
    """The step of one way, compiled and run once."""

    def loss(inputs: Array, weights: dict[str, Array]) -> Array:
        return jnp.square(lax.scan(wrap(layer), inputs, weights)[0].astype(jnp.float32)).mean()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(inputs, weights).compile()
    memory = step.memory_analysis()
    run = lambda: jax.block_until_ready(step(inputs, weights))
    run()
    return Step(run, memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 32768), ("width", 2048), ("layers", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    normal = lambda *shape: jax.random.normal(jax.random.key(sum(shape)), shape, given.dtype)
    width, inner = given.width, 4 * given.width
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    weights = {name: normal(given.layers, *shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    inputs = normal(given.tokens, width)

    steps = {name: prepared(wrap, inputs, weights) for name, wrap in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step.run()
            seconds[name].append(time.perf_counter() - start)
    table = Table("kept", "step, ms", "range", "MiB", "MiB on the host", caption=f"{given}, jax {jax.__version__}")
    for name, step in steps.items():
        median, least, most = (1e3 * of(seconds[name]) for of in (statistics.median, min, max))
        mebibytes = [f"{size / 2**20:,.0f}" for size in (step.device_bytes, step.host_bytes)]
        table.add_row(name, f"{median:.1f}", f"{least:.1f} to {most:.1f}", *mebibytes)
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
