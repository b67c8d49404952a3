"""What a `score_mod` reads of the arrays that it closes over (`program_reads`), and which of it has what gradient.

A number that positions have no part in is one for all of a tile, and its gradient a sum over a head's logits. Others
are gathered from a table, which has to stay in the multiprocessor's cache, and their gradients are sums by index.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jflash._semantics.program_reads import Read, analysis
from jflash._semantics.spec import Spec
from jflash._semantics.tracing import values_of_64_bits

MOST_BYTES = 64 * 1024
"""The most that a table may have."""


def array_name(index: int) -> str:
    """Return the name that an array has among a kernel's."""
    return f"score_mod_{index}"


def reads(spec: Spec) -> tuple[Read, ...]:
    """Return all that a call's score_mod reads of its arrays."""
    return () if spec.score_mod is None else analysis(spec.score_mod).reads


def unsupported(spec: Spec) -> str | None:
    """Return why kernels cannot take a call's `score_mod`, in words for the user; `None` if they can."""
    if spec.score_mod is None:
        return None
    found, arrays = analysis(spec.score_mod), spec.score_mod.jaxpr.consts
    large = [read for read in found.reads if read.by_position and 4 * math.prod(arrays[read.array].shape) > MOST_BYTES]
    reason = found.reason
    if any("array" in read.needs for read in found.reads):
        reason = reason or "reads an array at an index that it read from another"
    if large:
        reason = reason or f"reads by position an array of more than {MOST_BYTES // 1024} KiB in float32"
    if (wide := next(values_of_64_bits(spec.score_mod.jaxpr.jaxpr), None)) is not None:
        reason = reason or f"computes in {wide.aval.dtype}; x.astype(logit.dtype) makes fewer bits of an x"
    if reason is not None:
        return f"it takes no score_mod that {reason}."
    if spec.deterministic and tables(spec):
        return (
            "with deterministic=True it takes no score_mod that reads by position: its gradient is summed in any order."
        )
    return None


def smooth(spec: Spec) -> list[Read]:
    """Return what is read of arrays that have a gradient."""
    if spec.score_mod is None:
        return []
    dtypes = [array.dtype for array in spec.score_mod.jaxpr.consts]
    return [read for read in reads(spec) if jnp.issubdtype(dtypes[read.array], jnp.inexact)]


def summed(spec: Spec) -> list[Read]:
    """Return the reads whose gradients are sums over positions."""
    return [read for read in smooth(spec) if not read.by_position]


def of_tables(spec: Spec) -> list[Read]:
    """Return the reads whose gradients are sums by index."""
    return [read for read in smooth(spec) if read.by_position]


def tables(spec: Spec) -> dict[str, int]:
    """Return how many numbers each array has that is read by position and whose gradient is asked for, by name."""
    if spec.score_mod is None or "score_mod_arrays" in spec.undifferentiated:
        return {}
    shapes = [array.shape for array in spec.score_mod.jaxpr.consts]
    return {array_name(read.array): math.prod(shapes[read.array]) for read in of_tables(spec)}
