"""Triangle attention of AlphaFold: rows of the pair representation attend to themselves, with a bias for each pair.

The pair representation of L residues is [L, L, channels]. Around the starting node, each of its L rows is a sequence of
L, and the rows are the batch. All rows share the bias [heads, L, L], so it has no batch axis. Its gradient is summed
over the rows tile by tile, and no array of L**3 logits is made, forward or backward. Around the ending node, columns
take the place of rows: transpose the representation. Triangle attention has heads of 32; the extra MSA stack attends
with the same bias and heads of 8.

Source: Jumper et al. (2021), doi:10.1038/s41586-021-03819-2, supplement, algorithms 7, 13 and 14.
"""

from __future__ import annotations

import jax
from _report import Report, compare, normal, report, shares, with_gradients
from jax import Array

import jflash

RESIDUES, HEADS = 48, 4


def attend(query: Array, key: Array, value: Array, pair_bias: Array) -> Array:
    """The first three are [rows, residues, heads, head_dim], `pair_bias` is [heads, residues, residues]."""
    return jflash.attention(query, key, value, pair_bias)


def plain(query: Array, key: Array, value: Array, pair_bias: Array) -> Array:
    """The logits of all rows at once."""
    return jax.nn.dot_product_attention(query, key, value, bias=pair_bias[None])


def main() -> Report:
    """Output and gradients, the bias's too, with heads of both sizes."""
    errors = {}
    for head_dim in (8, 32):
        arrays = normal(*[(RESIDUES, RESIDUES, HEADS, head_dim)] * 3, (HEADS, RESIDUES, RESIDUES))
        found = compare([with_gradients(attend)], with_gradients(plain), arrays)
        errors |= {f"{name}, heads of {head_dim}": pair for name, pair in found.items()}
    return report(f"Triangle attention, {RESIDUES} residues", errors, *shares(attend, *arrays[:2], arrays[3]))


if __name__ == "__main__":
    main()
