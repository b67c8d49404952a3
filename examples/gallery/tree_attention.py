"""Tree attention: a model checks a whole tree of drafted tokens in one step of speculative decoding.

The keys are a cache, all of which every node sees, and behind it the nodes themselves, of which a node sees its
ancestors and itself. The tree is known at run time only. Most tiles are of the cache, and carry no mask.

Source: SpecInfer, Miao et al. (2024), arXiv:2305.09781, section 4.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from _report import Report, compare, normal, report, shares
from jax import Array
from rich.console import Console

import jflash

CACHED, NODES, HEADS, HEAD_DIM = 2000, 64, 4, 32


def parents(nodes: int) -> Array:
    """A random tree: the parent of each node, which comes before it; the first is the root, its own parent."""
    random = np.random.default_rng(0)
    return jnp.asarray([0, *(random.integers(0, node) for node in range(1, nodes))])


def ancestors(parent: Array) -> Array:
    """`[nodes, nodes]`: whether the second is the first or an ancestor of it."""
    step = lambda node, seen: seen.at[node].set(seen[parent[node]] | seen[node])
    return jax.lax.fori_loop(1, len(parent), step, jnp.eye(len(parent), dtype=bool))


def attend(query: Array, key: Array, value: Array, parent: Array) -> Array:
    """`query` [batch, nodes, heads, head_dim], `key` and `value` of the cache and the nodes, `parent` [nodes]."""
    seen, cached = ancestors(parent), key.shape[1] - len(parent)
    sees = lambda b, h, node, j: (j < cached) | seen[node, jnp.maximum(j - cached, 0)]
    return jflash.attention(query, key, value, mask_mod=sees)


def plain(query: Array, key: Array, value: Array, parent: Array) -> Array:
    """The same with a mask of all pairs."""
    seen, cached = ancestors(parent), key.shape[1] - len(parent)
    mask = jnp.concatenate([jnp.ones((len(parent), cached), bool), seen], axis=1)
    return jax.nn.dot_product_attention(query, key, value, mask=mask[None, None])


def main() -> Report:
    """The output, and how many tiles are visited."""
    shapes = [(1, length, HEADS, HEAD_DIM) for length in (NODES, CACHED + NODES, CACHED + NODES)]
    arrays, parent = normal(*shapes), parents(NODES)
    seen = ancestors(parent)
    sees = lambda b, h, node, j: (j < CACHED) | seen[node, jnp.maximum(j - CACHED, 0)]
    tiles = jflash.tile_map(sees, query_length=NODES, key_length=CACHED + NODES)
    line = f"the tree: {tiles.visited:.0%} of its tiles visited, {tiles.partial:.0%} with a mask"
    Console(highlight=False).print(line)
    errors = compare([attend], plain, [*arrays, parent])
    return report("Tree attention", errors, *shares(attend, *arrays[:2], parent))


if __name__ == "__main__":
    main()
