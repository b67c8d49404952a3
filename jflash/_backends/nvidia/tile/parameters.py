"""Which operands shape a call's logits and have a gradient that kernels sum."""

from __future__ import annotations

from jflash._semantics import score_mod_reads
from jflash._semantics.spec import Spec

_PARAMETERS = ("scale", "alibi_slopes", "bias")
"""Operands that shape logits, whose gradients kernels sum."""


def parameters(spec: Spec) -> tuple[str, ...]:
    """What shapes a call's logits and has a gradient that is asked for: operands, and reads of a score_mod."""
    asked = spec.operands - spec.undifferentiated
    reads = score_mod_reads.summed(spec) if "score_mod_arrays" in asked else []
    return *(name for name in _PARAMETERS if name in asked), *(read.name for read in reads)
