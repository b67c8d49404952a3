"""A call through the kernels: its operands put into the form that they take, and what they return back into the call's.

Short queries that share keys are packed into the rows of one tile, rows and head dims are rounded up to what copies of
tiles ask for, and parameters' gradients are summed to their own shapes.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jflash._backends.mosaic_gpu import (
    backward_kernel,
    d_bias_kernel,
    d_key_value_kernel,
    d_query_kernel,
    delta_kernel,
    forward_kernel,
    inputs,
    key_columns,
    pairs,
    spans,
    statistics,
    tiles,
)
from jflash._backends.mosaic_gpu.inputs import Arrays
from jflash._backends.mosaic_gpu.operations import Operations
from jflash._backends.mosaic_gpu.rounds import Rounds
from jflash._semantics.online_softmax import finite_or_zero, sinks_gradient
from jflash._semantics.spec import Operands, Residuals, Spec

SHORT = 16
"""Queries up to which heads that share keys are packed into the rows of one tile."""


def forward(
    spec: Spec, operands: Operands, operations: Operations
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Output in the query's dtype and log-sum-exp in float32."""
    packed = spec.group if _packs(spec) else 1
    query = _whole_tiles(operands.query) if packed == 1 else _whole_tiles(_pack(operands.query, packed), axis=2)
    key, value = _whole_tiles(operands.key), _whole_tiles(operands.value)
    edges = inputs.edges(operands, {"value": value})
    in_columns = ["bias"] if key_columns.are_there(spec) else []
    sides = inputs.prepare(spec, operands, *in_columns) | inputs.words(spec, operands, operations) | edges
    rows = spec.query_length * packed
    visits = lambda rows, keys: _visits(spec, max(rows // packed, 1), keys)
    sizes = forward_kernel.sizes(spec, query, value, sides)
    heads, splits = spec.heads // packed, 1
    share = (operations.processors or 0) / (spec.batch * heads)
    tile = tiles.forward_tiles(sizes, rows, visits, share, _most_warpgroups(spec))
    if in_columns:
        sides |= key_columns.prepare(spec, operands, tile.keys)
    if rows <= tile.rows:
        splits = max(1, min(int(share), spec.key_length // (4 * tile.keys)))
    if splits > 1:
        work = Rounds(1, spec.batch)
    else:
        work = tile.rounds(
            sizes,
            visits(tile.rows, tile.keys),
            rows,
            spec.batch,
            heads,
            operations.processors,
            lengths_differ=spec.bounds[0] is None and spec.bounds[1] is not None,
            known_late=not spec.operands.isdisjoint(spans.LIMITS),
        )
    known = spans.table(spec, operands, max(tile.rows // packed, 1), tile.missing(rows) // packed)
    out, lse = forward_kernel.forward(
        spec, query, key, value, sides, known, tile, work, operations, packed=packed, splits=splits
    )
    if packed > 1:
        out = out.swapaxes(2, 3)
    if splits == 1:
        out, lse = out[0], lse[0]
    else:
        out, lse = _merge(operands, out, lse)
    out, lse = out[:, :rows, :, : spec.value_dim].astype(spec.dtype), lse[:, :, :rows]
    if packed > 1:
        out = _unpack(out, packed)
        lse = _unpack(lse.transpose(0, 2, 1), packed).transpose(0, 2, 1)
    return out, lse


def backward(spec: Spec, operands: Operands, residuals: Residuals, operations: Operations) -> Operands:
    """Gradients of all operands that have one, in their dtypes and shapes."""
    query, key, value, d_out = map(_whole_tiles, (operands.query, operands.key, operands.value, residuals.d_out))
    edges = inputs.edges(operands, {"query": query, "key": key, "value": value, "d_out": d_out})
    sides, words = inputs.prepare(spec, operands), functools.partial(inputs.words, spec, operands, operations)
    arrays = Arrays(query, key, value, d_out, sides | words() | edges)
    keys_first = arrays._replace(sides=sides | words(keys_first=True) | edges)
    differentiated = [name for name in ("scale", "alibi_slopes", "bias") if name in spec.operands - spec.constants]
    by_pair = "bias" in differentiated and pairs.bias_kind(spec) == "tile"
    if by_pair:
        differentiated.remove("bias")
    tile = _fused_tiles(spec, arrays, differentiated)
    sums_type = None if tile is None else backward_kernel.sums_type(arrays, tile, operations)
    delta, columns, zeros = delta_kernel.delta(spec, residuals, sums_type, operations)
    lse = jnp.where(residuals.lse == -jnp.inf, jnp.inf, residuals.lse)
    rows = statistics.subtrahends(spec, lse, delta)
    if tile is None:
        d_query, d_key, d_value, sums = _split(spec, operands, arrays, keys_first, rows, differentiated, operations)
    else:
        assert zeros is not None
        known = spans.table(spec, operands, tile.keys, of_keys=True)
        beginnings = statistics.vectors(spec, lse, delta) if columns is None else (columns, statistics.factors())
        d_query, d_key, d_value, sums = backward_kernel.backward(
            spec, keys_first, beginnings, zeros, known, tuple(differentiated), tile, operations
        )
    d_bias = _d_bias(spec, operands, arrays, rows, operations) if by_pair else None

    def trimmed(gradient: Array, like: Array) -> Array:
        return gradient[:, : like.shape[1], :, : like.shape[3]].astype(like.dtype)

    sums = {name: _reduced(spec, name, total, getattr(operands, name)) for name, total in sums.items()}
    return Operands(
        query=trimmed(d_query, operands.query),
        key=trimmed(d_key, operands.key),
        value=trimmed(d_value, operands.value),
        bias=sums.get("bias", d_bias),
        scale=sums.get("scale"),
        alibi_slopes=sums.get("alibi_slopes"),
        sinks=sinks_gradient(operands.sinks, lse, delta),
    )


def _most_warpgroups(spec: Spec) -> int:
    """Among how many warpgroups the registers may be divided that a forward with narrow tiles has."""
    # With a bias of keys that is added to logits three spill 304 bytes and take 27% longer than two, with ALiBi 484 and
    # 45%. With a soft cap they take 14% less where products are small, and where they are large 80% longer: there 550
    # are spilled.
    return 4 if inputs.is_plain(spec) or key_columns.are_there(spec) else 2


def _visits(spec: Spec, rows: int, keys: int) -> list[int]:
    """How many tiles of so many keys each block of so many queries visits, by what is known before the call."""
    left, right = spec.bounds
    stop = np.arange(spec.query_length, 0, -rows)[::-1]
    first = np.maximum(stop - rows, 0)
    offset = spec.query_offset or 0
    first_key = np.zeros_like(first) if left is None else np.maximum(first + offset - left, 0)
    stop_key = np.full_like(stop, spec.key_length) if right is None else stop + offset + right
    seen = np.minimum(stop_key, spec.key_length) - first_key
    return np.maximum(-(-seen // keys), 1).tolist()


Gradients = tuple[Array, Array, Array, dict[str, Array]]
"""dQ, dK, dV, and by name what the parameters' gradients are summed from."""


def _fused_tiles(spec: Spec, arrays: Arrays, differentiated: list[str]) -> tiles.BackwardTiles | None:
    """Tiles of the one kernel that makes all gradients. `None` where two have to: an order of sums is promised, one
    over keys is wanted, or it does not fit."""
    by_query = "bias" in differentiated and pairs.bias_kind(spec) == "row"
    if spec.deterministic or by_query:
        return None
    sizes = arrays.query.shape[3], arrays.value.shape[3], pairs.tile_bytes(spec, arrays.sides)
    return tiles.backward_tiles(*sizes, plain=inputs.is_plain(spec))


def _split(
    spec: Spec,
    operands: Operands,
    arrays: Arrays,
    keys_first: Arrays,
    rows: tuple[Array, Array],
    differentiated: list[str],
    operations: Operations,
) -> Gradients:
    tile = tiles.query_tiles(arrays.query.shape[3], arrays.value.shape[3], pairs.tile_bytes(spec, arrays.sides))
    by_key = "bias" in differentiated and pairs.bias_kind(spec) == "column"
    known = spans.table(spec, operands, tile.rows)
    wanted = tuple(name for name in differentiated if name != "bias" or not by_key)
    d_query, sums = d_query_kernel.d_query(spec, arrays, rows, known, wanted, tile, operations)
    known = spans.table(spec, operands, tiles.ROWS, of_keys=True)
    d_key, d_value, d_columns = d_key_value_kernel.d_key_value(spec, keys_first, rows, known, by_key, operations)
    if by_key:
        (sums["bias"],) = d_columns
    return d_query, d_key, d_value, sums


def _d_bias(
    spec: Spec,
    operands: Operands,
    arrays: Arrays,
    rows: tuple[Array, Array],
    operations: Operations,
) -> Float[Array, "#B #N T S"]:
    """The gradient of a bias that has a query and a key axis."""
    assert spec.bias_shape is not None
    bias_bytes = arrays.sides["bias"].dtype.itemsize
    tile = tiles.bias_tiles(arrays.query.shape[3], arrays.value.shape[3], bias_bytes)
    known = spans.table(spec, operands, tile.rows)
    d_bias = d_bias_kernel.d_bias(spec, arrays, rows, known, tile, operations)
    return d_bias[:, :, : spec.bias_shape[2], : spec.bias_shape[3]]


def _reduced(spec: Spec, name: str, total: Array, like: Array) -> Array:
    """A parameter's gradient from what kernels summed, `[B, N, L]`."""
    if name == "bias":
        kind = pairs.bias_kind(spec)
        assert spec.bias_shape is not None
        if kind in ("row", "column"):
            total = total[:, :, : max(spec.bias_shape[2:])]
            total = total[..., None] if kind == "row" else total[:, :, None]
        else:
            total = total.sum(axis=2)[..., None, None]
    else:
        total = total.sum(axis=2)
        total = total.sum(axis=1) if like.ndim == 1 else total
    shared = tuple(axis for axis, size in enumerate(like.shape) if size == 1 and total.shape[axis] > 1)
    return total.sum(axis=shared, keepdims=True).astype(like.dtype)


def _whole_tiles(array: Array, axis: int = 1) -> Array:
    """`[B, L, N, H]` (L at `axis`) in the shape of `tiles.whole`: zeros are added."""
    room = [(0, more - size) for more, size in zip(tiles.whole(array.shape, axis), array.shape, strict=True)]
    return jnp.pad(array, room)


def _packs(spec: Spec) -> bool:
    """Whether heads that share keys go into the rows of one tile: few queries, nothing that differs by head, and blocks
    that end where a query's heads do."""
    alike = {"bias", "mask", "alibi_slopes", "query_segments", "sinks"}.isdisjoint(spec.operands)
    whole = spec.query_length * spec.group <= 2 * tiles.ROWS or tiles.ROWS % spec.group == 0
    return alike and spec.score_mod is None and spec.query_length <= SHORT and spec.group > 1 and whole


def _pack(array: Array, group: int) -> Array:
    """`[B, T, K * G, H]` as `[B, K, T * G, H]`."""
    batch, rows, heads, dim = array.shape
    split = array.reshape(batch, rows, heads // group, group, dim)
    return jnp.moveaxis(split, 2, 1).reshape(batch, heads // group, rows * group, dim)


def _unpack(array: Array, group: int) -> Array:
    """`[B, T * G, K, ...]` as `[B, T, K * G, ...]`."""
    batch, rows, heads, *rest = array.shape
    split = array.reshape(batch, rows // group, group, heads, *rest)
    return jnp.moveaxis(split, 2, 3).reshape(batch, rows // group, heads * group, *rest)


def _merge(operands: Operands, out: Array, lse: Array) -> tuple[Array, Array]:
    """One output and log-sum-exp from those of all splits: `[splits, B, T, N, D]`, `[splits, B, N, L]`."""
    largest = finite_or_zero(lse.max(axis=0))
    weights = jnp.exp(lse - largest)
    total = weights.sum(axis=0)
    empty = total == 0
    if operands.sinks is not None:
        total = total + jnp.exp(operands.sinks[:, :, None].astype(jnp.float32) - largest)
    total = jnp.where(empty, 1, total)
    factors = jnp.moveaxis(weights / total, 3, 2)[:, :, : out.shape[2], :, None]
    return (out * factors).sum(axis=0), jnp.where(empty, -jnp.inf, largest + jnp.log(total))
