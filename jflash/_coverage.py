"""Makes the map of the tiles that a call's `mask_mod` shows, before the call is split and differentiated.

The forward, the backward and all else that is made of one call share that map.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jflash import _dispatch
from jflash._choice import Choice
from jflash._ring import in_shard_map
from jflash._semantics import coverage
from jflash._semantics.coverage import Grid
from jflash._semantics.spec import Operands, Spec


def with_coverage(choice: Choice, spec: Spec, operands: Operands) -> tuple[Spec, Operands]:
    """Return the call with the map of its `mask_mod`, if some backend that serves it visits tiles by a map."""
    if spec.mask_mod is None or operands.coverage is not None or 0 in (spec.query_length, spec.key_length, spec.batch):
        return spec, operands
    if not any(_visits(spec, program.backend, program.platform) for program in choice.programs):
        return spec, operands
    whole = in_shard_map(spec)
    queries, keys = (
        (spec.query_length, spec.key_length) if whole is None else (whole.call.query_length, whole.call.key_length)
    )
    arrays = tuple(array[0] for array in operands.mask_mod_arrays)
    found = coverage.of_mask_mod(spec.mask_mod, arrays, spec.batch, spec.heads, queries, keys)
    operands = operands._replace(coverage=found)
    return spec.resized(operands), operands


def _visits(spec: Spec, name: str, platform: object) -> bool:
    ask = getattr(_dispatch.BACKENDS[name], "visits_lists", None)
    return ask is not None and ask(spec, platform)


def lines(spec: Spec) -> Iterator[str]:
    """Yield what intervals do not see through in a `mask_mod`, in words for the user."""
    if spec.mask_mod is None:
        return
    found: dict[str, int] = {}
    grid = Grid(spec.batch, spec.heads, spec.query_length, spec.key_length)
    arrays = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in spec.mask_mod.jaxpr.consts]

    def look(arrays: list[jax.Array]) -> jax.Array:
        assert spec.mask_mod is not None
        seen, unknown = coverage.by_intervals(spec.mask_mod, arrays, grid)
        found.update(unknown)
        return jnp.any(seen.some)

    jax.eval_shape(look, arrays)
    if found:
        names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(found.items()))
        yield (
            f"mask_mod: intervals do not see through {names}; tiles that depend on it are looked at pair by pair, or "
            "visited with a mask."
        )
