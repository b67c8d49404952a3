"""The defects that are planted to see what the tests notice, each with the test that is there to notice it."""

from defect import Defect
from kernel_defects import KERNEL_DEFECTS

EXACT = "tests/attention/test_exactness.py::test_exact"
PROPERTIES = "tests/attention/test_properties.py"
VISIBILITY = "tests/semantics/test_visibility.py"
SEQUENCES = "tests/transforms/test_sequences.py"
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"

DEFECTS = [
    Defect(
        "A window has one key less on its left",
        "visible",
        "first = jnp.maximum(tile.position - left, 0)",
        "first = jnp.maximum(tile.position - left + 1, 0)",
        VISIBILITY,
    ),
    Defect(
        "Tiles are skipped as if there was no query_offset",
        "key_spans",
        "start = jnp.maximum(start, first + least_offset - left)",
        "start = jnp.maximum(start, first - left)",
        VISIBILITY,
    ),
    Defect(
        "Tiles between two parts of a segment carry no mask",
        "key_spans",
        "full_stop = jnp.where(unbroken, jnp.minimum(full_stop, every_stop), start)",
        "full_stop = jnp.minimum(full_stop, every_stop)",
        VISIBILITY,
    ),
    Defect(
        "score_mod gets the indices of query and key exchanged",
        "modify_logits",
        "tile.head, *tile.indices, parameters.score_mod_arrays",
        "tile.head, *reversed(tile.indices), parameters.score_mod_arrays",
        EXACT,
    ),
    Defect(
        "All heads have the dropout of the first",
        "head_seed",
        "counted = 0 if spec.broadcast_dropout else",
        "counted = 0 if True else",
        "tests/semantics/test_dropout.py",
    ),
    Defect(
        "The log-sum-exp is without the sink",
        "finish",
        "lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))",
        "lse = jnp.where(empty, -jnp.inf, finite_or_zero(rows.largest) + jnp.log(jnp.where(empty, 1, rows.total)))",
        f"{PROPERTIES}::test_a_sink_is_a_key_without_a_value",
    ),
    Defect(
        "The gradient of the sinks is the first batch entry's",
        "sinks_gradient",
        "gradient.sum(axis=0, keepdims=True)",
        "gradient[:1]",
        f"{PROPERTIES}::test_a_sink_is_a_key_without_a_value",
    ),
    Defect(
        "xla: padding in keys and values is not zeroed",
        "zero_padded_keys",
        "return zero_padding(array, tile.key.reshape(1, 1, -1, 1), tile.key_lengths.reshape(-1, 1, 1, 1))",
        "return array",
        f"{PROPERTIES}::test_what_padding_holds",
    ),
    Defect(
        "xla: rows that two blocks share count twice in dK and dV",
        "probabilities",
        "        if self.place.fresh is not None:\n",
        "        if self.place.fresh is not None and False:\n",
        "tests/backends/xla/test_tiles.py",
    ),
    Defect(
        "xla: the cotangent of the log-sum-exp is dropped",
        "backward",
        "jnp.where(empty, 0, -residuals.d_lse)",
        "jnp.zeros_like(delta)",
        EXACT,
    ),
    Defect(
        "xla: products are summed in the call's dtype",
        "dot",
        "preferred_element_type=spec.accumulator)",
        "preferred_element_type=spec.dtype).astype(spec.accumulator)",
        EXACT,
    ),
    Defect(
        "xla: the tangent of the log-sum-exp is not subtracted",
        "weighted",
        "(self.t_logits - centre)",
        "self.t_logits",
        "tests/transforms/test_derivatives.py",
    ),
    Defect(
        "Under vmap an operand is not spread where its tangent is",
        "_batch.fold",
        "whole = place in spread or ",
        "whole = mapped or ",
        "tests/transforms/test_transforms.py::test_other_modes",
    ),
    Defect(
        "vmap folds the mapped axis into the batch from behind",
        "_batch.fold",
        "return jnp.broadcast_to(array, (size, batch, *rest)).reshape(",
        "return jnp.broadcast_to(array, (size, batch, *rest)).swapaxes(0, 1).reshape(",
        "tests/transforms/test_vmap.py",
    ),
    Defect(
        "Under vmap the batch shares what it has a gradient of",
        "_batch.fold",
        "name in operation.own or is_summed",
        "name in operation.own",
        "tests/transforms/test_vmap.py",
    ),
    Defect(
        "Gradients of what devices with other heads share are not summed",
        "missing",
        "dict.fromkeys((*self.batch, *self.heads, *self.queries, *self.keys))",
        "dict.fromkeys((*self.batch, *self.queries, *self.keys))",
        "tests/transforms/test_sharding.py::test_all_operands",
    ),
    Defect(
        "metal: no barrier between the weights and their product with the values",
        "forward_block",
        BARRIER + "    if (simd_any(memory.rescale",
        "    if (simd_any(memory.rescale",
        "tests/backends/metal/test_metal_proof.py::test_unbroken",
    ),
    Defect(
        "metal: the sum of the weights is not rescaled where their reference moves",
        "online_softmax",
        "  row.l *= rescale;\n",
        "",
        "tests/attention/test_exactness.py::test_logits_that_rise_from_tile_to_tile",
    ),
    Defect(
        "metal: of a tile that is seen in part every pair is seen",
        "visible",
        "    result = result && mask_bit(tile.mask, query, key);\n",
        "",
        "tests/backends/metal/test_metal_lists.py::test_exact",
    ),
    Defect(
        "metal: the values of a cache have the scales of its keys",
        "value_rows",
        "head.v_scale",
        "head.k_scale",
        "tests/backends/metal/test_metal_pages.py::test_scaled",
    ),
    Defect(
        "Both queries of a dropout counter have one word",
        "SHIFTS_AND_FACTORS",
        "(13, 0xD35A2D97)",
        "(15, FACTORS[1])",
        "tests/semantics/test_dropout.py",
    ),
    Defect(
        "Halves come back in the order of the ring",
        "leave",
        "halves = {name: self._in_order(array) for name, array in runs.items()}",
        "halves = dict(runs)",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "Dropout counts the keys of each device from 0",
        "part_of",
        "first_key=first_key[None] if indexed else None",
        "first_key=None",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "Every device adds the gradient of sinks that devices share",
        "_sinks_gradient",
        "counted = ~empty & jnp.asarray(split.ring or split.keys.own == 0)",
        "counted = ~empty",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "Lengths and offsets are read as they are given",
        "in_range",
        "jnp.clip(values, *ranges.get(name, (-_OFFSET_LIMIT, _OFFSET_LIMIT)))",
        "values",
        "tests/attention/test_any_lengths.py",
    ),
    Defect(
        "Tokens of several steps have the places of one's",
        "joined",
        "each + rows * jnp.arange",
        "each + 0 * jnp.arange",
        "tests/attention/test_ragged.py",
    ),
    *KERNEL_DEFECTS,
]
