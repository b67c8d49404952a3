"""Train a character transformer whose context is split over devices, and again on one device.

The mesh has the axes "data" and "context", and the tokens are split over both. That is all that the program says: the
model is the one of train_transformer.py, and what is computed for each token stays where the token is. `jit` and jflash
do the rest. The table of positions and Adam's means of it have a row for each token, so they are split like the tokens.

    python examples/long_context.py                          # all devices along the context; 8 simulated ones on a CPU
    python examples/long_context.py --data 2 --context 4     # sequences of a batch over 2, each over 4
    python examples/long_context.py --heads 8                # as many heads as devices: all-to-all in place of the ring

It prints what jflash does with the sequences, the losses of both runs side by side, and for one training step the
memory of each device and the most that one collective gives it. The losses differ by rounding only: it fails if they
differ by more than those of a third run do, on one device with its weights disturbed by rounding. With 8 devices, each
needs 0.23 of the temporary memory of one alone at 4,096 characters, and 0.15 at 16,384.

What moves between devices: in every layer a device's keys and values, and in the backward their gradients with them,
round the ring of devices, and halves of what each device has, traded so that all have the same to do (both
collective-permute). Or, in place of that, each device's queries, keys, values and outputs by heads (all-to-all). Once
in a step, sums of the gradients of weights that devices share (all-reduce). Nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax
import numpy as np
import optax
import text
import transformer_equinox
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from train_transformer import disturb, rounding

import jflash

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train with the context split over devices and on one device, and compare losses and memory."""

    data: int = 1
    """Devices over which the sequences of a batch are divided."""
    context: int | None = None
    """Devices over which each sequence is divided; by default all that are left."""
    steps: int = 10
    """Batches to train on."""
    batch: int = 2
    """Sequences in a batch."""
    length: int = 4096
    """Characters in a sequence."""
    width: int = 64
    """Numbers that stand for a character between the layers."""
    heads: int = 4
    """Attention heads of a layer."""
    layers: int = 2
    """Blocks of attention and perceptron."""
    learning_rate: float = 1e-3
    """The learning rate of Adam."""
    seed: int = 0
    """The seed of the first weights and of the batches."""


class Run:
    """One model in training, and its losses so far."""

    def __init__(self, settings: Settings, devices: np.ndarray, *, disturbance: float = 0.0):
        """Make the run on `devices` `[data, context]`. `disturbance` is that of train_transformer.py."""
        self._devices = devices
        shape = {name: getattr(settings, name) for name in ("length", "width", "heads", "layers", "seed")}
        model = transformer_equinox.Transformer(text.TOKENS, **shape, use_jflash=True)
        weights, logits = transformer_equinox.split(model)
        optimizer = optax.adam(settings.learning_rate)
        self._learned = self._place((weights, optimizer.init(weights)))

        def loss(weights: Any, seen: jax.Array, following: jax.Array, step: int) -> jax.Array:
            if disturbance:
                weights = disturb(weights, disturbance, jax.random.fold_in(jax.random.key(settings.seed), step))
            return optax.softmax_cross_entropy_with_integer_labels(logits(weights, seen), following).mean()

        def update(learned: Any, seen: jax.Array, following: jax.Array, step: int) -> tuple[Any, jax.Array]:
            weights, state = learned
            value, gradients = jax.value_and_grad(loss)(weights, seen, following, step)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(weights, updates), state), value

        tokens = self._tokens(np.zeros((settings.batch, settings.length + 1), np.int32))
        shardings = jax.tree.map(lambda array: array.sharding, self._learned)
        step = jax.jit(update, out_shardings=(shardings, self._sharding(P())), donate_argnums=0)
        self.compiled = step.lower(self._learned, *tokens, np.int32(0)).compile()
        self.losses: list[float] = []

    def step(self, tokens: np.ndarray) -> None:
        """Learn from one batch `[batch, length + 1]`."""
        self._learned, loss = self.compiled(self._learned, *self._tokens(tokens), np.int32(len(self.losses)))
        self.losses.append(float(loss))

    def memory(self) -> list[int]:
        """Temporary and argument bytes of a step on each device, as XLA has planned them."""
        analysis = self.compiled.memory_analysis()
        return [analysis.temp_size_in_bytes, analysis.argument_size_in_bytes]

    def received(self) -> list[int]:
        """The most bytes that a collective of each kind gives a device; 0: there is none."""
        most = dict.fromkeys(COLLECTIVES, 0)
        pattern = rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-done)?\("
        for results, kind in re.findall(pattern, self.compiled.as_text()):
            arrays = re.findall(r"[a-z](\d+)\[([\d,]*)\]", results)
            size = sum(int(bits) // 8 * math.prod(map(int, filter(None, axes.split(",")))) for bits, axes in arrays)
            most[kind] = max(most[kind], size)
        return list(most.values())

    def _sharding(self, spec: P) -> Sharding:
        return sharding(self._devices, spec) if self._devices.size > 1 else SingleDeviceSharding(self._devices.item())

    def _tokens(self, tokens: np.ndarray) -> list[jax.Array]:
        """Return what the model sees, and what it should predict."""
        return [jax.device_put(part, self._sharding(P("data", "context"))) for part in (tokens[:, :-1], tokens[:, 1:])]

    def _place(self, tree: Any) -> Any:
        """Positions are split like the tokens; all other weights are whole on every device."""

        def place(path: Any, array: jax.Array) -> jax.Array:
            positions = "position" in jax.tree_util.keystr(path)
            return jax.device_put(array, self._sharding(P("context") if positions else P()))

        return jax.tree_util.tree_map_with_path(place, tree)


def sharding(devices: np.ndarray, spec: P) -> NamedSharding:
    """Return a sharding over the mesh of `devices` `[data, context]`; what is not said is left to the compiler."""
    return NamedSharding(Mesh(devices, ("data", "context"), (AxisType.Auto, AxisType.Auto)), spec)


def find_devices(settings: Settings) -> np.ndarray:
    """`[data, context]`, simulated ones if there is only one."""
    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)  # must be said before JAX is asked for its devices
    every = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    context = settings.context or len(every) // settings.data
    count = settings.data * context
    if not 1 < count <= len(every):
        raise SystemExit(f"The mesh must have 2 to {len(every)} devices. Got {settings.data} x {context}.")
    return np.array(every[:count]).reshape(settings.data, context)


def main(settings: Settings) -> None:
    """Train the three side by side, batch by batch; compare."""
    console = Console(highlight=False)
    devices = find_devices(settings)
    one_device, columns = devices[:1, :1], ("one device", f"{devices.shape[0]} x {devices.shape[1]} devices")
    jax.config.update("jax_default_device", one_device.item())
    shape = (settings.batch, settings.length, settings.heads, settings.width // settings.heads)
    heads = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding(devices, P("data", "context")))
    console.print(jflash.explain(heads, heads, heads, is_causal=True), soft_wrap=True)

    runs = {
        "one": Run(settings, one_device),
        "split": Run(settings, devices),
        "disturbed": Run(settings, one_device, disturbance=rounding(settings)),
    }
    drawn = {name: getattr(settings, name) for name in ("steps", "batch", "length", "seed")}
    batches = text.batches(text.standard_library(), **drawn)
    table = Table("step", *columns, title="loss, nats per character")
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=settings.steps)
        for step, batch in enumerate(batches):
            for run in runs.values():
                run.step(batch)
            table.add_row(str(step), *(f"{runs[name].losses[-1]:.7f}" for name in ("one", "split")))
            progress.update(task, advance=1, description=f"loss {runs['split'].losses[-1]:.3f}")
    console.print(table)

    table = Table("one training step, KiB a device", *columns)
    of_step = [[*runs[name].memory(), *runs[name].received()] for name in ("one", "split")]
    for name, *sizes in zip(("temporary", "arguments", *COLLECTIVES), *of_step, strict=True):
        table.add_row(name, *(f"{size / 1024:,.1f}" for size in sizes))
    console.print(table)
    losses = {name: np.array(run.losses) for name, run in runs.items()}
    difference, allowed = (abs(losses[name] - losses["one"]).max() for name in ("split", "disturbed"))
    console.print(f"Largest difference at any step: {difference:.1e}. Rounding can make it {allowed:.1e}.")
    if not difference <= allowed:  # so written, a NaN fails too
        raise SystemExit("The losses differ by more than rounding.")


if __name__ == "__main__":
    main(tyro.cli(Settings))
