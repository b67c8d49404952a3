"""Makes the map of the tiles that a call's functions show, before the call is split and differentiated.

The forward, the backward and all else that is made of one call share that map.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jflash import _dispatch
from jflash._choice import Choice
from jflash._ring import in_shard_map
from jflash._semantics import coverage, score_mod_as_mask, visits
from jflash._semantics.coverage import Coverage, Grid
from jflash._semantics.spec import Operands, Spec


def with_coverage(choice: Choice, spec: Spec, operands: Operands) -> tuple[Spec, Operands]:
    """Return the call with the map of its functions, if some backend that serves it visits tiles by a map."""
    if not visits.has_map(spec) or 0 in (spec.query_length, spec.key_length, spec.batch):
        return spec, operands
    if not any(_visits(spec, program.backend, program.platform) for program in choice.programs):
        return spec, operands
    return mapped(spec, operands)


def mapped(spec: Spec, operands: Operands) -> tuple[Spec, Operands]:
    """Return the call with the map of its `mask_mod`, if it has none yet, and of a `score_mod` that hides keys."""
    whole = in_shard_map(spec)
    queries, keys = (
        (spec.query_length, spec.key_length) if whole is None else (whole.call.query_length, whole.call.key_length)
    )
    size = spec.batch, spec.heads, queries, keys
    found = operands.coverage
    if spec.mask_mod is not None and found is None:
        found = coverage.of_mask_mod(spec.mask_mod, tuple(array[0] for array in operands.mask_mod_arrays), *size)
    if spec.score_mod is not None and score_mod_as_mask.hides(spec.score_mod):
        traced = score_mod_as_mask.mask_of(spec.score_mod, [array[0] for array in operands.score_mod_arrays])
        shown = Coverage.decoded(coverage.of_mask_mod(traced.mask_mod, traced.arrays, *size)).some
        # What is left of the tile is hidden by the function itself.
        of_score_mod = Coverage(shown, shown)
        found = (of_score_mod if found is None else Coverage.decoded(found) & of_score_mod).encoded()
    operands = operands._replace(coverage=found)
    return spec.resized(operands), operands


def _visits(spec: Spec, name: str, platform: object) -> bool:
    ask = getattr(_dispatch.BACKENDS[name], "visits_lists", None)
    return ask is not None and ask(spec, platform)


def lines(spec: Spec) -> Iterator[str]:
    """Yield what is known of the tiles of a call's functions, in words for the user."""
    if score_mod_as_mask.hides(spec.score_mod):
        yield "score_mod: it chooses -inf by position; tiles of which that is known are not visited."
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
