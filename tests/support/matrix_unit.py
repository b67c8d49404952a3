"""How the matrix unit of an NVIDIA GPU adds a product to an accumulator in float32: toward zero.

Numbers are aligned to the largest of them, and what lies below is cut off. So a sum that is made there loses half a
unit in the last place with each addition, on average, and always toward zero; rounding to nearest would lose nothing on
average. What is the product's own is as `product` has it: only sums with what was there before are cut off.

Source: Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, doi:10.7717/peerj-cs.330; Ootomo
and Yokota, arXiv:2203.03341, section III.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

DEPTH = 16
"""Terms of a dot product that are added at once: those of an instruction."""


def add_product(acc: Array, a: Array, b: Array) -> Array:
    """acc + a @ b, as the matrix unit adds each of its steps."""
    rows = a.reshape(len(a), -1, DEPTH).swapaxes(0, 1)
    columns = b.reshape(-1, DEPTH, b.shape[1])

    def step(acc: Array, factors: tuple[Array, Array]) -> tuple[Array, None]:
        return add(acc, jnp.dot(*factors, preferred_element_type=jnp.float32)), None

    return lax.scan(step, acc, (rows, columns))[0]


def add(acc: Any, product: Any) -> Any:
    """acc + product, in float32, in numpy or JAX."""
    of = acc.__array_namespace__()
    total = acc + product
    # What rounding to nearest took from the sum, exactly: Knuth's TwoSum.
    moved = total - acc
    lost = (acc - (total - moved)) + (product - moved)
    is_larger = ((total > 0) & (lost < 0)) | ((total < 0) & (lost > 0))
    return of.where(is_larger, of.nextafter(total, of.zeros_like(total)), total)
