"""The output's cotangent without rows of queries that see no key: they have nowhere to go, and 0 * NaN is NaN.

    for each 128 queries of a head:
      if some lse is -inf: dO = 0 in their rows, in place

Where all queries see a key, the kernel reads the log-sum-exp alone, and nothing of d_out.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jflash._backends.nvidia.launch import Launch, Refs, cta_index
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.threads.builder import THREADS
from jflash._semantics import visibility
from jflash._semantics.spec import Residuals, Spec


def zeroed(spec: Spec, residuals: Residuals, ops: Ops) -> Float[Array, "B T N D"]:
    """Return d_out with zeros for queries that see no key. XLA copies it if something else reads it as it was."""
    if not visibility.hidden_rows_have_cotangents(spec):
        return residuals.d_out
    batch, length, heads, value_dim = residuals.d_out.shape
    ctas = dict(batch=batch, block=pl.cdiv(length, THREADS), head=heads)
    launch = Launch(f"jflash_hidden_rows_{value_dim}", ctas, results={})
    arrays, states = dict(lse=residuals.lse), dict(d_out=residuals.d_out)
    return launch.update(lambda refs: _kernel(refs, ops), arrays, states, ops)[1]["d_out"]


def _kernel(refs: Refs, ops: Ops) -> None:
    batch, block, head = (cta_index(name) for name in ("batch", "block", "head"))
    ops.zero_hidden_rows(refs.arrays["d_out"].at[batch, :, head], refs.arrays["lse"].at[batch, head], block * THREADS)
