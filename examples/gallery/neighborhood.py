"""Neighborhood attention: a pixel of an image sees the square of pixels around it.

Pixels in reading order make a sequence. There the square lies in a window of `RADIUS` lines to each side, and
`local_window_size` skips what is outside it. The `score_mod` hides what the window has too much: the pixels of those
lines that are too far to the left or right. A pixel near the border sees fewer.

Source: Ramachandran et al. (2019), arXiv:1906.05909; Hassani et al. (2023), arXiv:2204.07143, shift the square at the
border instead, so that all pixels see as many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

HEIGHT, WIDTH, RADIUS = 48, 32, 3
HEADS, HEAD_DIM = 2, 32


def attend(query: Array, key: Array, value: Array, width: int = WIDTH) -> Array:
    """All are [batch, height * width, heads, head_dim]."""

    def hide(logit: Array, batch: Array, head: Array, query_index: Array, key_index: Array) -> Array:
        return jnp.where(jnp.abs(query_index % width - key_index % width) <= RADIUS, logit, -jnp.inf)

    # The farthest corner of the square. Pixels of one more line that the score_mod lets pass are beyond it, as
    # (RADIUS + 1) * width - RADIUS is more, if the image is wider than the radius twice.
    window = RADIUS * width + RADIUS
    return jflash.attention(query, key, value, local_window_size=window, score_mod=hide)


def mask(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Return which pixels see which."""
    line, column = np.divmod(np.arange(height * width), width)
    near = lambda place: np.abs(place[:, None] - place) <= RADIUS
    return near(line) & near(column)


def plain(query: Array, key: Array, value: Array) -> Array:
    """The square as a mask of all pairs."""
    return jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask())[None, None])


def main() -> Report:
    """Output and gradients."""
    arrays = normal(*[(1, HEIGHT * WIDTH, HEADS, HEAD_DIM)] * 3)
    errors = compare([with_gradients(attend)], with_gradients(plain), arrays)
    title = f"Neighborhood attention, {HEIGHT} x {WIDTH} pixels, {2 * RADIUS + 1} x {2 * RADIUS + 1} around each"
    return report(title, errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
