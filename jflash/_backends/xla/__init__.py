"""Tiled attention in plain JAX: runs wherever JAX does, and is the default off Hopper.

`tiling` walks over the tiles that some query can see; `forward` runs the online softmax along the walk, and `backward`
recomputes each tile from the log-sum-exp and sums what the tiles contribute.
"""

from __future__ import annotations

from jflash._backends.xla.backward import backward
from jflash._backends.xla.forward import forward
from jflash._platform import Platform
from jflash._semantics.spec import Spec

__all__ = ["DIFFERENTIABLE_BACKWARD", "backward", "forward", "unsupported"]

DIFFERENTIABLE_BACKWARD = True


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Only the gradient of arrays inside `score_mod` can depend on the order of a GPU's atomic additions."""
    if spec.deterministic and "score_mod_arrays" in spec.operands and platform.name == "gpu":
        return (
            "deterministic=True with a score_mod that closes over arrays: on a GPU, XLA may sum the gradient "
            "of indexed arrays in any order."
        )
    return None
