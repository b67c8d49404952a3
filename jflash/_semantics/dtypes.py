"""Dtypes of what is computed, whatever the caller's `jax_numpy_dtype_promotion` is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def widened(dtype: Any, other: Any = np.float32) -> np.dtype[Any]:
    """The dtype that JAX's standard rules promote both to: with strict ones, JAX refuses to say."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(dtype, other))
