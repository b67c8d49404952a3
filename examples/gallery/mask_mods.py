"""Any mask as a function: `mask_mod(batch, head, query_index, key_index) -> bool`.

jflash reads the function's program. Tiles that it hides are not visited, forward and backward; tiles that it shows
whole carry no mask. `jflash.tile_map` says which they are, and makes that once for many calls. What a function reads,
such as the documents' ids, may be known only at run time.

Sources: prefixes, T5, arXiv:1910.10683; frames that see each other and those before them, as in diffusion forcing,
arXiv:2407.01392; images that see themselves inside causal text, Transfusion, arXiv:2408.11039; dilated windows,
Longformer, arXiv:2004.05150; BigBird, arXiv:2007.14062; neighborhoods, arXiv:2204.07143.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array
from rich.console import Console

import jflash

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 1024, 2, 32

MaskMod = Callable[[Array, Array, Array, Array], Array]
"""On scalars; each function below takes arrays that broadcast just as well, and so `plain` uses it too."""


def documents(tokens: int) -> MaskMod:
    """Packed documents whose parts come in any order; a token sees what came before it in its own document."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, -(-tokens // 50)).repeat(50)[:tokens])
    return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)


def prefix(tokens: int) -> MaskMod:
    """Each sequence of the batch has a prefix of its own length, all of which it sees."""
    lengths = jnp.array([tokens // 8, tokens // 2])
    return lambda b, h, i, j: (j <= i) | (j < lengths[b])


def frames(tokens: int) -> MaskMod:
    """Frames of 96 tokens see themselves and the three frames before."""
    del tokens
    return lambda b, h, i, j: (i // 96 - j // 96 >= 0) & (i // 96 - j // 96 < 4)


def images(tokens: int) -> MaskMod:
    """Text is causal, and the tokens of an image see each other."""
    starts = np.arange(tokens // 7, tokens - 120, tokens // 4)
    number = jnp.asarray(sum((np.arange(tokens) >= s).astype(int) * (np.arange(tokens) < s + 120) * s for s in starts))
    return lambda b, h, i, j: (j <= i) | ((number[i] == number[j]) & (number[i] > 0))


def dilated(tokens: int) -> MaskMod:
    """A window in which every second head sees every fourth key only."""
    del tokens
    return lambda b, h, i, j: (jnp.abs(i - j) < 128) & ((h % 2 == 0) | ((i - j) % 4 == 0))


def neighborhood(tokens: int) -> MaskMod:
    """Pixels of a square image in reading order see the 7 x 7 around them."""
    side = int(tokens**0.5)
    return lambda b, h, i, j: (jnp.abs(i // side - j // side) <= 3) & (jnp.abs(i % side - j % side) <= 3)


def bigbird(tokens: int) -> MaskMod:
    """Blocks of 64 see their neighbours, the first block and three others; the first sees all."""
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, tokens // 64, (tokens // 64, 3)))

    def sees(b: Array, h: Array, i: Array, j: Array) -> Array:
        near = jnp.abs(i // 64 - j // 64) <= 1
        return near | (i < 64) | (j < 64) | jnp.any(chosen[i // 64] == jnp.expand_dims(j // 64, -1), axis=-1)

    return sees


MASKS = (documents, prefix, frames, images, dilated, neighborhood, bigbird)


def attend(query: Array, key: Array, value: Array, make: Callable[[int], MaskMod] = documents) -> Array:
    """All are [batch, tokens, heads, head_dim]."""
    return jflash.attention(query, key, value, mask_mod=make(query.shape[1]))


def plain(query: Array, key: Array, value: Array, make: Callable[[int], MaskMod] = documents) -> Array:
    """The function of all pairs at once, as a mask."""
    batch, tokens, heads, _ = query.shape
    index = jnp.ix_(*map(jnp.arange, (batch, heads, tokens, tokens)))
    return jax.nn.dot_product_attention(query, key, value, mask=make(tokens)(*index))


def main() -> Report:
    """Output and gradients with each function, and how many of its tiles are visited."""
    arrays = normal(*[(BATCH, TOKENS, HEADS, HEAD_DIM)] * 3)
    errors = {}
    for make in MASKS:
        of = lambda attention, make=make: lambda query, key, value: attention(query, key, value, make)
        found = compare([with_gradients(of(attend))], with_gradients(of(plain)), arrays)
        errors |= {f"{name}, {make.__name__}": pair for name, pair in found.items()}
        sizes = dict(batch=BATCH, heads=HEADS, query_length=TOKENS, key_length=TOKENS)
        tiles = jflash.tile_map(make(TOKENS), **sizes)
        visited = f"{tiles.visited:.0%} of its tiles visited, {tiles.partial:.0%} with a mask"
        Console(highlight=False).print(f"{make.__name__}: {visited}")
    return report("mask_mod, documents", errors, *shares(attend, *arrays[:2]))


if __name__ == "__main__":
    main()
