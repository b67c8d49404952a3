"""Train a character transformer with jflash inside Flax's or Equinox's attention layer, and with other attentions.

The text is the source of Python's standard library. All runs start from the same weights and see the same batches, so
their losses differ by rounding only. One more run shows how much rounding can do: the attention that the others are
compared with once more, with the weights disturbed by it. Prints losses, tokens a second and the memory of a training
step, fails if the losses differ by more than rounding makes, and draws them.

    python examples/train_transformer.py --framework flax
    python examples/train_transformer.py --framework flax --attention jflash xla --width 256 --length 2048 --batch 1

GPT-2 with its 124 million parameters, for an NVIDIA GPU (README.md beside this file has what was measured, and where):

    python examples/train_transformer.py --framework flax --size gpt2 --attention jflash cudnn xla --length 8192
    python examples/train_transformer.py --framework flax --size gpt2 --attention jflash cudnn xla --length 32768
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import pathlib
import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
import tyro
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jflash
from jflash import _platform
from jflash.bench.clocks import on_nvidia

MIB = 2**20
SIZES: dict[str, dict[str, Any]] = {
    "small": dict(steps=300, batch=4, length=256, width=128, heads=4, layers=2, dtype="float32"),
    "gpt2": dict(steps=50, batch=1, length=8192, width=768, heads=12, layers=12, dtype="bfloat16"),
}
TOKENS = {"small": text.TOKENS, "gpt2": 50257}
"""The number of tokens. The text has 96 also where the model could tell more apart, as GPT-2 can."""
COLORS = {"jflash": "tab:red", "own": "0.6", "xla": "tab:blue", "cudnn": "tab:green"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train with several attentions, and compare their losses, speed and memory."""

    framework: Literal["flax", "equinox"]
    """The library whose attention layer jflash serves."""
    size: Literal["small", "gpt2"] = "small"
    """The size of the model and the run. What is not given below is this size's."""
    attention: tuple[Literal["jflash", "own", "xla", "cudnn"], ...] = ("jflash", "own")
    """Attentions to compare with the last of them: jflash, the layer's own attention, jax.nn's plain one, cuDNN's."""
    steps: int | None = None
    """Batches to train on."""
    batch: int | None = None
    """Sequences in a batch."""
    length: int | None = None
    """Characters in a sequence."""
    width: int | None = None
    """Numbers that stand for a character between the layers."""
    heads: int | None = None
    """Attention heads of a layer."""
    layers: int | None = None
    """Blocks of attention and perceptron."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype of the activations; weights are float32."""
    learning_rate: float = 1e-3
    """The learning rate of Adam."""
    seed: int = 0
    """The seed of the first weights and of the batches."""
    picture: pathlib.Path | None = None
    """Where to write the curves, as PNG; by default train_<framework>.png."""
    record: pathlib.Path | None = None
    """Where to write all figures, as JSON."""
    weights: pathlib.Path | None = None
    """Where to write what the first run has learned, for serve.py."""

    def complete(self) -> Settings:
        """Return the settings with the numbers of their size.

        Raises:
          SystemExit: this machine or this framework cannot do it.
        """
        missing = {name: value for name, value in SIZES[self.size].items() if getattr(self, name) is None}
        settings = dataclasses.replace(self, **missing)
        if self.framework == "equinox" and (
            self.size != "small" or settings.dtype != "float32" or not {"jflash", "own"}.issuperset(self.attention)
        ):
            raise SystemExit("`--framework equinox` has the small size in float32, with the attentions jflash and own.")
        if "cudnn" in self.attention and not on_nvidia():
            raise SystemExit(f"`--attention cudnn` needs an NVIDIA GPU, and this is {_platform.current()}.")
        if "cudnn" in self.attention and settings.dtype == "float32":
            raise SystemExit("`--attention cudnn` takes 16-bit numbers only: give `--dtype bfloat16`.")
        return settings


class Run:
    """One model in training, and its losses and times so far."""

    def __init__(self, settings: Settings, attention: str, *, disturbance: float = 0.0):
        """Make the run. `disturbance` is the fraction of itself by which each weight is off, at random, wherever it is
        used."""
        module = importlib.import_module(f"transformer_{settings.framework}")
        if settings.framework == "flax":
            variant = dict(attention=attention, dtype=jnp.dtype(settings.dtype))
        else:
            variant = dict(use_jflash=attention == "jflash")
        shape = {name: getattr(settings, name) for name in ("length", "width", "heads", "layers", "seed")}
        model = module.Transformer(TOKENS[settings.size], **shape, **variant)
        weights, logits = module.split(model)
        optimizer = optax.adam(settings.learning_rate)
        self._learned = weights, optimizer.init(weights)
        self.attention = attention
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(weights))
        self.losses: list[float] = []
        self.seconds: list[float] = []

        def loss(weights: Any, tokens: jax.Array, step: jax.Array) -> jax.Array:
            if disturbance:
                weights = disturb(weights, disturbance, jax.random.fold_in(jax.random.key(settings.seed), step))
            predicted = logits(weights, tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()

        def update(learned: Any, tokens: jax.Array, step: jax.Array) -> tuple[Any, jax.Array]:
            weights, state = learned
            value, gradients = jax.value_and_grad(loss)(weights, tokens, step)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(weights, updates), state), value

        tokens = jax.ShapeDtypeStruct((settings.batch, settings.length + 1), np.int32)
        self._update = jax.jit(update, donate_argnums=0).lower(self._learned, tokens, np.int32(0)).compile()

    def step(self, tokens: np.ndarray) -> None:
        """Learn from one batch `[batch, length + 1]`."""
        start = time.perf_counter()
        self._learned, loss = jax.block_until_ready(self._update(self._learned, tokens, np.int32(len(self.losses))))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def save(self, path: pathlib.Path) -> None:
        """Writes the weights, in the order of the model's tree."""
        np.savez(path, *jax.tree.leaves(self._learned[0]))

    @property
    def kept_bytes(self) -> int:
        """The bytes held from one step to the next: weights, and the optimizer's state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._learned))

    @property
    def planned_bytes(self) -> int:
        """The bytes that a training step holds at once, as XLA has planned it."""
        memory = self._update.memory_analysis()
        arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.temp_size_in_bytes + arguments

    @property
    def median_seconds(self) -> float:
        """The median time of a step; the first warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)


def disturb(weights: Any, fraction: float, key: jax.Array) -> Any:
    """Each weight moved up or down, at random, by `fraction` of itself."""
    flat, restore = ravel_pytree(weights)
    return restore(flat * (1 + fraction * jax.random.rademacher(key, flat.shape)))


def rounding(settings: Any, dtype: Any = jnp.float32) -> float:
    """Return what another order of attention's sums can amount to, as a relative change of the numbers that go in.

    A sum of n terms, rounded in whatever order, is the exact sum of terms that are each off by at most n * u, where u =
    eps / 2 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Attention sums over the head
    dimension and over the keys; two orders may err in opposite directions; the layers add up. Sums are float32; a
    result that is rounded to a narrower `dtype` may end one step of it away.
    """
    terms = settings.width // settings.heads + settings.length
    narrow = float(jnp.finfo(dtype).eps) if jnp.dtype(dtype).itemsize < 4 else 0.0
    return settings.layers * terms * float(jnp.finfo(jnp.float32).eps) + narrow


def draw(record: dict[str, Any], path: pathlib.Path) -> None:
    """Loss curves above, how far they are from the last attention's below; to the right speed and memory."""
    runs, last = record["runs"], record["compared_with"]
    losses = {name: np.array(run["losses"]) for name, run in runs.items()}
    measured = [name for name in runs if name != "disturbed"]
    figure = Figure(figsize=(10, 6), layout="constrained")
    (above, speed), (below, memory) = figure.subplots(2, 2, width_ratios=(2, 1), height_ratios=(3, 2))
    for name in reversed(measured):
        above.plot(losses[name], color=COLORS[name], linewidth=5 if name == last else 1.2, label=name)
    above.set(ylabel="loss, nats per character", xlabel="step")
    above.legend(frameon=False)
    for name in ("disturbed", *(name for name in measured if name != last)):
        label = "weights disturbed by rounding" if name == "disturbed" else name
        color = COLORS.get(name, "0.8")
        below.semilogy(abs(losses[name] - losses[last]), ".", color=color, markersize=3, label=label)
    below.set(xlabel="step", ylabel=f"difference from {last}")
    below.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    for axes, figure_name, title in (
        (speed, "tokens_per_second", "tokens a second"),
        (memory, "step_mib", "memory of a step, MiB"),
    ):
        bars = axes.bar(measured, [runs[name][figure_name] for name in measured], color=[COLORS[n] for n in measured])
        axes.bar_label(bars, fmt="{:,.0f}")
        axes.margins(y=0.15)
        axes.set_title(title, fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(record["about"], fontsize="x-small")
    figure.savefig(path, dpi=150)


def about() -> str:
    """Return when, where and with what it was measured."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jflash", "jax", "jaxlib", "flax"))
    return f"{datetime.date.today()}, {_platform.device_name()}; {versions}"


def explained(settings: Settings) -> str:
    """Return what jflash does in a layer."""
    heads = (settings.batch, settings.length, settings.heads, settings.width // settings.heads)
    return jflash.explain(*[jax.ShapeDtypeStruct(heads, settings.dtype)] * 3, is_causal=True)


def device_bytes() -> float:
    """The device's memory, as far as JAX tells."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))


def prepare(settings: Settings) -> tuple[dict[str, Run], dict[str, str]]:
    """The runs that fit into the device's memory, with the disturbed one, and why others do not."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    for name in settings.attention:
        run = Run(settings, name)
        # The disturbed run makes one more, of which each keeps as much while this one takes a step.
        limit = device_bytes() - len(settings.attention) * run.kept_bytes
        if run.planned_bytes > limit:
            room = f"the other runs leave {max(0, limit) / MIB:,.0f}"
            refused[name] = f"a step needs {run.planned_bytes / MIB:,.0f} MiB, and {room}"
        else:
            runs[name] = run
    if runs:
        last = list(runs)[-1]
        runs["disturbed"] = Run(settings, last, disturbance=rounding(settings, settings.dtype))
    return runs, refused


def measured(settings: Settings, runs: dict[str, Run], refused: dict[str, str]) -> dict[str, Any]:
    """All figures, as they are written down."""
    last = runs["disturbed"].attention
    tokens = settings.batch * settings.length
    losses = {name: np.array(run.losses) for name, run in runs.items()}
    return dict(
        about=about(),
        settings=dataclasses.asdict(dataclasses.replace(settings, picture=None, record=None, weights=None)),
        explain=explained(settings),
        parameters=runs[last].parameters,
        compared_with=last,
        refused=refused,
        differences={name: float(abs(each - losses[last]).max()) for name, each in losses.items()},
        runs={
            name: dict(
                tokens_per_second=tokens / run.median_seconds,
                step_mib=run.planned_bytes / MIB,
                losses=run.losses,
                seconds=run.seconds,
            )
            for name, run in runs.items()
        },
    )


def table(record: dict[str, Any]) -> Table:
    """A row for each attention."""
    names = ("attention", "loss at the end", "difference at most", "tokens a second", "a step, MiB")
    table = Table(*names, title=f"{record['parameters']:,} parameters", caption=record["about"])
    for name, run in record["runs"].items():
        if name != "disturbed":
            figures = f"{run['tokens_per_second']:,.0f}", f"{run['step_mib']:,.0f}"
            table.add_row(name, f"{run['losses'][-1]:.7f}", f"{record['differences'][name]:.1e}", *figures)
    for name, reason in record["refused"].items():
        table.add_row(name, reason)
    return table


def main(settings: Settings) -> None:
    """Train all side by side, batch by batch; compare, draw and write down."""
    settings = settings.complete()
    console = Console(highlight=False)
    runs, refused = prepare(settings)
    if not runs:
        raise SystemExit("\n".join(f"{name}: {reason}." for name, reason in refused.items()))
    batches = text.batches(
        text.standard_library(),
        steps=settings.steps,
        batch=settings.batch,
        length=settings.length,
        seed=settings.seed,
    )
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=settings.steps)
        for batch in batches:
            for run in runs.values():
                run.step(batch)
            progress.update(task, advance=1, description=f"loss {run.losses[-1]:.3f}")

    if settings.weights is not None:
        next(iter(runs.values())).save(settings.weights)
    record = measured(settings, runs, refused)
    path = settings.picture or pathlib.Path(f"train_{settings.framework}.png")
    draw(record, path)
    if settings.record is not None:
        settings.record.write_text(json.dumps(record, indent=1) + "\n")
    allowed = record["differences"].pop("disturbed")
    difference = max(record["differences"].values())
    console.print(table(record))
    console.print(
        f"{record['explain']}\n"
        f"Largest difference at any step from {record['compared_with']}: {difference:.1e}. "
        f"Rounding can make it {allowed:.1e}.\n"
        f"The curves: {path}",
        soft_wrap=True,
    )
    if not difference <= allowed:  # so written, a NaN fails too
        raise SystemExit("The losses differ by more than rounding.")


if __name__ == "__main__":
    main(tyro.cli(Settings))
