"""The tile of the backward as array code: what a backward kernel computes between its products, in both orientations.

One tile holds all queries and keys of a head here. How kernels walk over several is tested with each kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import cases
import hopper_kernels
import jax
import jax.numpy as jnp
import oracle
import pytest
from array_ref import ArrayRef
from cases import Case
from interpreter import Interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float
from plain_attention import Call

from jflash._backends import reference
from jflash._backends.nvidia.facts import facts_of
from jflash._backends.nvidia.finish import finish_backward
from jflash._backends.nvidia.ops import along_columns, along_rows
from jflash._backends.nvidia.prepared import PreparedBackward
from jflash._backends.nvidia.smem import WARPGROUP_ROWS
from jflash._backends.nvidia.tile import dropped
from jflash._backends.nvidia.tile.backward_tile import BackwardTile
from jflash._backends.nvidia.tile.gradient_sums import ParameterSums, TableSums, wanted_parameters
from jflash._backends.nvidia.tile.inputs import KernelInputs, TileCoord
from jflash._backends.nvidia.walk import tile_range
from jflash._backends.nvidia.walk.tile_list import Blocks
from jflash._backends.nvidia.walk.tile_range import Place, TileContext
from jflash._semantics.online_softmax import sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec

SIZE = WARPGROUP_ROWS
OPS = Interpreter(plgpu.InterpretGPUParams(detect_races=False))
ONE = functools.partial(Case, query_length=60, key_length=50, heads=(1, 1), dims=(8, 8), batch=(2,))
CASES = [
    ONE(heads=(2, 1)),
    ONE(scale="traced", causal=True, offset="end"),
    ONE(soft_cap=1.5, lengths="both", sinks=True),
    ONE(bias="queries", window=(20, 10), offset="each"),
    ONE(bias="keys", mask="keys", alibi=True),
    ONE(bias="heads", segments="unsorted", score_mod="indices"),
    ONE(bias="full", mask="full", dropout=True),
    ONE(score_mod="arrays", dropout=True, lengths="keys", mask="queries"),
    ONE(alibi=True, scale="traced", soft_cap=1.5, dropout=True, causal=True),
]


class Delta(PreparedBackward):
    @functools.cached_property
    def delta(self) -> Float[Array, "B N T"]:
        residuals = self.residuals
        delta = (residuals.out * residuals.d_out).sum(axis=-1).transpose(0, 2, 1) - residuals.d_lse
        return jnp.where(residuals.lse == -jnp.inf, 0, delta)


def rows(array: Array, entry: int, head: int, length: Array | None) -> Float[Array, "64 H"]:
    """A head's rows of `[B, L, N, H]`, with zeros past a length and in the place of rows that there are not."""
    own = jnp.pad(array[entry, :, head], ((0, SIZE - array.shape[1]), (0, 0)))
    if length is None:
        return own
    return jnp.where(jnp.arange(SIZE)[:, None] < jnp.broadcast_to(length, array.shape[:1])[entry], own, 0)


def backward(spec: Spec, operands: Operands, residuals: Residuals, *, keys_first: bool) -> Operands:
    """The gradients of a call, each head of which is one tile."""
    call = Delta(spec, operands, residuals, OPS)
    d_out = call.residuals.d_out
    ranges = tile_range.table(spec, operands, Blocks(SIZE, SIZE, of_keys=keys_first))
    arrays = call.others | call.rows | call.packed_mask(keys_first=keys_first) | ranges
    refs = {name: ArrayRef(array) for name, array in arrays.items()}
    inputs = KernelInputs(spec, OPS, refs, keys_first=keys_first)
    wanted, kind = wanted_parameters(spec), facts_of(spec).bias_kind
    sums = ParameterSums(tuple(name for name in wanted if (name, kind) != ("bias", "tile")))
    tables = TableSums.of(spec, 1, 1, 1)
    states = {name: ArrayRef(array) for name, array in tables.zeros().items()}
    made: dict[str, Any] = {f"d_{name}": [] for name in ("query", "key", "value", *sums.names)}
    d_bias = jnp.zeros((spec.batch, spec.heads, SIZE, SIZE))

    for entry in range(spec.batch):
        for head in range(spec.heads):
            key_head = head // spec.group
            q, do = (rows(array, entry, head, operands.query_lengths) for array in (operands.query, d_out))
            k, v = (rows(array, entry, key_head, operands.key_lengths) for array in (operands.key, operands.value))
            left, right, do_left, do_right = (k, q, v, do) if keys_first else (q, k, do, v)
            at = TileCoord(jnp.int32(entry), jnp.int32(head), jnp.int32(0), jnp.int32(0))
            tiles = tile_range.visited(inputs, Place(at.batch, at.head, jnp.int32(0)), SIZE, SIZE)
            loaded = inputs.load_packed_mask(at, (SIZE, SIZE))
            if kind == "tile":
                shared, place = operands.bias.shape[:2], (entry, head)
                place = tuple(0 if size == 1 else index for size, index in zip(shared, place, strict=True))
                bias = jnp.pad(operands.bias[place], ((0, SIZE - spec.query_length), (0, SIZE - spec.key_length)))
                loaded |= {"bias": bias.T if keys_first else bias}
            along = along_columns if keys_first else along_rows
            lse, delta = (along(call.rows[name][entry, head, :SIZE], (SIZE, SIZE)) for name in ("lse", "delta"))
            context = TileContext(inputs, tiles.tile(0), at, loaded)
            differentiated = *sums.names, *tables.reads, *["bias"] * (kind == "tile" and "bias" in wanted)
            tile = BackwardTile.of(context, left @ right.T, lse, differentiated)
            gradients = tile.differentiate(do_left @ do_right.T, delta)
            ds, kept = (array.T if keys_first else array for array in (gradients.ds, tile.kept))
            made["d_query"].append(ds @ k * facts_of(spec).sums_scale)
            made["d_key"].append(ds.T @ q * facts_of(spec).sums_scale)
            made["d_value"].append(dropped.scaled(spec, kept.T @ do))
            for name, total in zip(sums.names, sums.added(sums.zeros(OPS), gradients.parameters), strict=True):
                made[f"d_{name}"].append(total)
            if "bias" in gradients.parameters and kind == "tile":
                own = gradients.parameters["bias"]
                d_bias = d_bias.at[entry, head].set(own.T if keys_first else own)
            tile.add_to_tables(tables.of_warpgroup(states, entry, head, 0, 0), gradients)

    by_head = lambda found: jnp.stack(found).reshape(spec.batch, spec.heads, *found[0].shape)
    arrays = {name: by_head(found) for name, found in made.items()}
    for name, heads in (("query", spec.heads), ("key", spec.key_heads), ("value", spec.key_heads)):
        grouped = arrays[f"d_{name}"].reshape(spec.batch, heads, -1, SIZE, arrays[f"d_{name}"].shape[-1]).sum(axis=2)
        arrays[f"d_{name}"] = grouped.transpose(0, 2, 1, 3)
    if kind == "tile":
        shared = tuple(axis for axis in (0, 1) if spec.bias_shape[axis] == 1)
        total = d_bias[:, :, : spec.query_length, : spec.key_length].sum(axis=shared, keepdims=True)
        arrays["whole_d_bias"] = total.astype(operands.bias.dtype)
    arrays |= tables.totals({name: state.array for name, state in states.items()})
    return finish_backward(spec, operands, arrays, sinks_gradient(operands.sinks, call.lse, call.delta))


@pytest.mark.parametrize("keys_first", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case, keys_first: bool):
    """Sums over keys want rows that are queries, and sums over queries want rows that are keys."""
    if case.bias in ("queries", "keys") and keys_first != (case.bias == "keys"):
        keys_first = not keys_first
    call = cases.build(case)
    oracle.assert_right(run(call, keys_first=keys_first), call)


def run(call: Call, *, keys_first: bool) -> Any:
    """A call's results, of which the tile makes the gradients, and the definition the rest."""
    spec, operands = hopper_kernels.canonical(call)
    out, lse = jax.jit(functools.partial(reference.forward, spec))(operands)
    residuals = hopper_kernels.residuals(call, spec, out, lse)
    pull_back = jax.jit(functools.partial(backward, spec, keys_first=keys_first))
    return hopper_kernels.results(call, out, lse, pull_back(operands, residuals))
