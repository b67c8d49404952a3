"""Places in ascending numbers."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


def count_up_to(ascending: Int[Array, "n"], values: Int[Array, "m"]) -> Int32[Array, "m"]:
    """Return how many of the ascending numbers are at most each value.

    XLA makes one kernel of all comparisons, and of a search, as in `jnp.searchsorted`, several.
    """
    return jnp.sum(ascending[None] <= values[:, None], axis=1, dtype=jnp.int32)
