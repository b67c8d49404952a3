"""Train a character transformer with jflash inside Flax's or Equinox's attention layer, and again without jflash.

The text is the source of Python's standard library. Both runs start from the same weights and see the same batches, so
their losses differ by rounding only. A third run shows how much rounding can do: the layer's own attention once more,
with the weights disturbed by it. Prints the final losses and the largest difference, fails if that is more than
rounding makes, and draws the curves.

    python examples/train_transformer.py --framework flax
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
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


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train with jflash and with the layer's own attention, and compare the losses."""

    framework: Literal["flax", "equinox"]
    """Whose attention layer jflash serves."""
    steps: int = 300
    """Batches to train on."""
    batch: int = 4
    """Sequences in a batch."""
    length: int = 256
    """Characters in a sequence."""
    width: int = 128
    """Numbers that stand for a character between the layers."""
    heads: int = 4
    """Attention heads of a layer."""
    layers: int = 2
    """Blocks of attention and perceptron."""
    learning_rate: float = 1e-3
    """Adam's."""
    seed: int = 0
    """Of the first weights and of the batches."""
    picture: pathlib.Path | None = None
    """Where to write the curves, as PNG; by default train_<framework>.png."""


class Run:
    """One model in training, and its losses so far."""

    def __init__(self, settings: Settings, *, use_jflash: bool, disturbance: float = 0.0):
        """`disturbance`: the fraction of itself by which each weight is off, at random, wherever it is used."""
        module = importlib.import_module(f"transformer_{settings.framework}")
        model = module.Transformer(
            tokens=text.TOKENS,
            length=settings.length,
            width=settings.width,
            heads=settings.heads,
            layers=settings.layers,
            use_jflash=use_jflash,
            seed=settings.seed,
        )
        self._weights, logits = module.split(model)
        optimizer = optax.adam(settings.learning_rate)
        self._state = optimizer.init(self._weights)
        self.losses: list[float] = []

        def loss(weights: Any, tokens: jax.Array, step: int) -> jax.Array:
            if disturbance:
                weights = disturb(weights, disturbance, jax.random.fold_in(jax.random.key(settings.seed), step))
            predicted = logits(weights, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()

        def update(weights: Any, state: Any, tokens: jax.Array, step: int) -> tuple[Any, Any, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(weights, tokens, step)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(weights, updates), state, value

        self._update = jax.jit(update)

    def step(self, tokens: np.ndarray) -> None:
        """Learn from one batch `[batch, length + 1]`."""
        self._weights, self._state, loss = self._update(self._weights, self._state, tokens, len(self.losses))
        self.losses.append(float(loss))


def disturb(weights: Any, fraction: float, key: jax.Array) -> Any:
    """Each weight moved up or down, at random, by `fraction` of itself."""
    flat, restore = ravel_pytree(weights)
    return restore(flat * (1 + fraction * jax.random.rademacher(key, flat.shape)))


def rounding(settings: Settings) -> float:
    """What another order of attention's sums can amount to, as a relative change of the numbers that go in.

    A sum of n terms, rounded in whatever order, is the exact sum of terms that are each off by at most n * u, where
    u = eps / 2 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Attention sums over the head
    dimension and over the keys; two orders may err in opposite directions; the layers add up.
    """
    terms = settings.width // settings.heads + settings.length
    return settings.layers * terms * float(jnp.finfo(jnp.float32).eps)


def draw(losses: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Both loss curves and, below, how far from the layer's own attention jflash and the disturbed run are."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(losses["own"], color="0.75", linewidth=5, label="the layer's own attention")
    above.plot(losses["jflash"], color="tab:red", linewidth=1.2, label="jflash")
    above.set_ylabel("loss, nats per character")
    above.legend(frameon=False)
    for name, color, label in (("disturbed", "0.75", "weights disturbed by rounding"), ("jflash", "tab:red", "jflash")):
        below.semilogy(abs(losses[name] - losses["own"]), ".", color=color, markersize=3, label=label)
    below.set(xlabel="step", ylabel="difference of the loss")
    below.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.savefig(path, dpi=150)


def main(settings: Settings) -> None:
    """Train the three side by side, batch by batch; compare and draw."""
    console = Console(highlight=False)
    runs = {
        "jflash": Run(settings, use_jflash=True),
        "own": Run(settings, use_jflash=False),
        "disturbed": Run(settings, use_jflash=False, disturbance=rounding(settings)),
    }
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
            progress.update(task, advance=1, description=f"loss {runs['jflash'].losses[-1]:.3f}")

    losses = {name: np.array(run.losses) for name, run in runs.items()}
    difference, allowed = (abs(losses[name] - losses["own"]).max() for name in ("jflash", "disturbed"))
    path = settings.picture or pathlib.Path(f"train_{settings.framework}.png")
    draw(losses, path)
    console.print(
        f"Loss after {settings.steps} steps: {losses['jflash'][-1]:.7f} with jflash, "
        f"{losses['own'][-1]:.7f} with {settings.framework}'s own attention.\n"
        f"Largest difference at any step: {difference:.1e}. Rounding can make it {allowed:.1e}.\n"
        f"Both curves: {path}",
        soft_wrap=True,
    )
    if not difference <= allowed:  # so written, a NaN fails too
        raise SystemExit("The losses differ by more than rounding.")


if __name__ == "__main__":
    main(tyro.cli(Settings))
