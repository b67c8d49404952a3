"""Train a small MeanFlow model, which draws digits in one step, with `jax.jvp` through jflash inside its loss.

Zhengyang Geng and others, arXiv:2505.13447. Data x and noise e are joined by z = (1 - t) x + t e, whose velocity is
v = e - x. The model u(z, r, t) learns the mean of the velocity between the times r and t: by its definition

    u = v - (t - r) du/dt,   where du/dt is u's derivative along (v, 0, 1)

so the loss has a tangent of the whole transformer in it, and training takes the gradient of that. Afterwards one step
leads from noise to data: x = e - u(e, 0, 1). The data are the digits of the fonts that come with matplotlib.

    python examples/meanflow.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from rich.console import Console
from rich.progress import Progress

import jflash

SIDE, PATCH, DIGITS = 16, 2, 10
TOKENS = (SIDE // PATCH) ** 2
"""The number of tokens: a token is a patch of 2 by 2 pixels."""

Parameters = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train a MeanFlow model of digits, and draw its losses and samples."""

    steps: int = 2000
    """Batches to train on."""
    batch: int = 64
    """Images in a batch."""
    width: int = 64
    """Numbers that stand for a patch between the layers."""
    heads: int = 4
    """Attention heads of a layer."""
    layers: int = 3
    """Blocks of attention and perceptron."""
    learning_rate: float = 2e-3
    """The learning rate of Adam, at its highest."""
    implementation: str | None = None
    """The implementation of `jflash.attention`; by default the one that serves."""
    seed: int = 0
    """The seed of the first weights, of the batches and of the samples."""
    picture: pathlib.Path = pathlib.Path("meanflow.png")
    """Where to write the losses and the samples, as PNG."""


def digits() -> np.ndarray:
    """`[fonts, 10, SIDE, SIDE]`, from -1, the paper, to 1."""
    folder = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf")
    images = []
    for path in sorted([*folder.glob("DejaVuS*.ttf"), *folder.glob("STIXGeneral*.ttf")]):
        # The files that end so hold a part of the characters alone.
        if "Display" in path.stem:
            continue
        for digit in range(DIGITS):
            font = FT2Font(str(path))
            font.set_size(14, 72)
            font.set_text(str(digit))
            font.draw_glyphs_to_bitmap()
            ink = np.asarray(font.get_image())[:SIDE, :SIDE]
            top, left = ((SIDE - size) // 2 for size in ink.shape)
            image = np.zeros((SIDE, SIDE), np.float32)
            image[top : top + ink.shape[0], left : left + ink.shape[1]] = ink / 127.5
            images.append(image - 1)
    return np.array(images).reshape(-1, DIGITS, SIDE, SIDE)


def batches(settings: Settings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images as tokens `[batch, TOKENS, PATCH**2]`, and their digits, drawn at random and moved by up to a pixel."""
    random, images = np.random.default_rng(settings.seed), digits()
    for _ in range(settings.steps):
        font, digit = random.integers(len(images), size=settings.batch), random.integers(DIGITS, size=settings.batch)
        moved = np.roll(images[font, digit], random.integers(-1, 2, 2), axis=(1, 2))
        yield to_tokens(moved), digit


def to_tokens(images: np.ndarray) -> np.ndarray:
    """`[B, SIDE, SIDE]` to `[B, TOKENS, PATCH**2]`."""
    across = SIDE // PATCH
    return images.reshape(-1, across, PATCH, across, PATCH).swapaxes(2, 3).reshape(-1, TOKENS, PATCH**2)


def to_images(tokens: np.ndarray) -> np.ndarray:
    """The mirror of `to_tokens`."""
    across = SIDE // PATCH
    return tokens.reshape(-1, across, across, PATCH, PATCH).swapaxes(2, 3).reshape(-1, SIDE, SIDE)


def initial(settings: Settings) -> Parameters:
    """The first weights of the transformer."""
    keys = iter(jax.random.split(jax.random.key(settings.seed), 8 * settings.layers + 8))
    width = settings.width

    def matrix(rows: int, columns: int, size: float = 1.0) -> jax.Array:
        return size * rows**-0.5 * jax.random.normal(next(keys), (rows, columns))

    def block() -> Parameters:
        return {
            "modulation": matrix(width, 6 * width, 0.1),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width, 0.1),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width, 0.1),
        }

    return {
        "patch": matrix(PATCH**2, width),
        "position": matrix(TOKENS, width, TOKENS**0.5),
        "digit": matrix(DIGITS, width, DIGITS**0.5),
        "times": matrix(2 * 32, width),
        "blocks": [block() for _ in range(settings.layers)],
        "last": matrix(width, PATCH**2, 0.1),
    }


def mean_velocity(
    settings: Settings, weights: Parameters, z: jax.Array, r: jax.Array, t: jax.Array, digit: jax.Array
) -> jax.Array:
    """Return u of images as tokens `[B, TOKENS, PATCH**2]`, between times r and t `[B]`, by a transformer."""
    frequencies = jnp.pi * 2.0 ** jnp.linspace(-1, 4, 16)
    angles = jnp.concatenate([t[:, None] * frequencies, (t - r)[:, None] * frequencies], axis=-1)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    condition = jax.nn.silu(waves @ weights["times"] + weights["digit"][digit])[:, None]
    hidden = z @ weights["patch"] + weights["position"]
    for block in weights["blocks"]:
        scales_and_shifts = jnp.split(condition @ block["modulation"], 6, axis=-1)
        for half, (scale, shift, gate) in enumerate((scales_and_shifts[:3], scales_and_shifts[3:])):
            normal = jax.nn.standardize(hidden) * (1 + scale) + shift
            if half == 0:
                heads = (*hidden.shape[:2], settings.heads, -1)
                query, key, value = (part.reshape(heads) for part in jnp.split(normal @ block["qkv"], 3, axis=-1))
                out = jflash.attention(query, key, value, implementation=settings.implementation)
                added = out.reshape(hidden.shape) @ block["out"]
            else:
                added = jax.nn.gelu(normal @ block["up"]) @ block["down"]
            hidden = hidden + (1 + gate) * added
    return jax.nn.standardize(hidden) @ weights["last"]


def loss(settings: Settings, weights: Parameters, x: jax.Array, digit: jax.Array, key: jax.Array) -> jax.Array:
    """The mean squared distance from what the definition asks for, each image weighted by its own (section 4.3)."""
    noise_key, times_key, instant_key = jax.random.split(key, 3)
    e = jax.random.normal(noise_key, x.shape)
    times = jax.nn.sigmoid(jax.random.normal(times_key, (2, len(x))) - 0.4)
    r, t = times.min(axis=0), times.max(axis=0)
    # Half of the batch learns the velocity itself.
    r = jnp.where(jax.random.bernoulli(instant_key, 0.5, r.shape), t, r)
    wide = lambda time: time[:, None, None]
    z, v = (1 - wide(t)) * x + wide(t) * e, e - x

    u, du_dt = jax.jvp(
        lambda z, r, t: mean_velocity(settings, weights, z, r, t, digit),
        (z, r, t),
        (v, jnp.zeros_like(r), jnp.ones_like(t)),
    )
    error = jnp.sum((u - jax.lax.stop_gradient(v - wide(t - r) * du_dt)) ** 2, axis=(1, 2))
    return jnp.mean(error / jax.lax.stop_gradient(error + 1e-2) ** 0.75)


def samples(settings: Settings, weights: Parameters, rows: int = 6) -> np.ndarray:
    """`[rows, 10, SIDE, SIDE]`: in each column a digit, made of noise in one step."""
    e = jax.random.normal(jax.random.key(settings.seed + 1), (rows * DIGITS, TOKENS, PATCH**2))
    zeros, digit = jnp.zeros(len(e)), jnp.tile(jnp.arange(DIGITS), rows)
    x = e - jax.jit(mean_velocity, static_argnums=0)(settings, weights, e, zeros, zeros + 1, digit)
    return to_images(np.asarray(x)).reshape(rows, DIGITS, SIDE, SIDE)


def draw(losses: np.ndarray, images: np.ndarray, path: pathlib.Path) -> None:
    """The losses, each and averaged, and beside them the samples."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    span = max(1, len(losses) // 50)
    left.semilogy(losses, ".", color="0.8", markersize=2, label="each batch")
    mean = np.convolve(losses, np.ones(span) / span, mode="valid")
    left.semilogy(np.arange(len(mean)) + span - 1, mean, color="tab:red", label=f"mean of {span}")
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    right.imshow(np.block([list(row) for row in images]), cmap="gray_r", vmin=-1, vmax=1)
    right.set(xticks=[], yticks=[], title="made of noise in one step")
    figure.savefig(path, dpi=150)


def main(settings: Settings) -> None:
    """Train, sample, draw."""
    console = Console(highlight=False)
    optimizer = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))

    @jax.jit
    def update(weights: Parameters, state: Any, average: Parameters, x: jax.Array, digit: jax.Array, step: int) -> Any:
        key = jax.random.fold_in(jax.random.key(settings.seed), step)
        value, gradients = jax.value_and_grad(lambda weights: loss(settings, weights, x, digit, key))(weights)
        updates, state = optimizer.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
        return weights, state, optax.incremental_update(weights, average, 0.005), value

    weights = average = initial(settings)
    state, losses, began = optimizer.init(weights), [], time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=settings.steps)
        for step, (x, digit) in enumerate(batches(settings)):
            weights, state, average, value = update(weights, state, average, x, digit, step)
            losses.append(float(value))
            progress.update(task, advance=1, description=f"loss {np.mean(losses[-50:]):.3f}")
    draw(np.array(losses), samples(settings, average), settings.picture)
    console.print(
        f"Loss: {losses[0]:.7f} at first, {losses[-1]:.7f} after {settings.steps} steps "
        f"in {time.perf_counter() - began:.0f} s.\nLosses and samples: {settings.picture}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
