"""Plants defects in a copy of the repository, one at a time, and shows that the tests of the short run notice each.

    python tests/support/planted_defects.py [--all] [--only WORD]

A defect is a piece of text, found once in its file, and what takes its place. Of the short run (`make test`) the tests
that are there to notice it go first, and all others after them, until one fails. What the short run notices, all tests
do, as they include it; with `--all` a defect that it misses is shown to the slow tests as well.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Defect:
    """One wrong piece of source."""

    name: str
    file: str
    right: str
    wrong: str
    first: str
    """The test that is to notice it."""

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.right)} times\n{self.right}")
        path.write_text(text.replace(self.right, self.wrong))


EXACT = "tests/attention/test_exactness.py::test_exact"
PROPERTIES = "tests/attention/test_properties.py"
VISIBILITY = "tests/semantics/test_visibility.py"
INTERPRETED = "tests/backends/mosaic_gpu/test_hopper_interpreted.py"
SEQUENCES = "tests/transforms/test_sequences.py"
BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"

DEFECTS = [
    Defect(
        "A window has one key less on its left",
        "jflash/_semantics/visibility.py",
        "first = jnp.maximum(tile.position - left, 0)",
        "first = jnp.maximum(tile.position - left + 1, 0)",
        VISIBILITY,
    ),
    Defect(
        "Tiles are skipped as if there was no query_offset",
        "jflash/_semantics/visibility.py",
        "start = jnp.maximum(start, first + least_offset - left)",
        "start = jnp.maximum(start, first - left)",
        VISIBILITY,
    ),
    Defect(
        "Tiles between two parts of a segment carry no mask",
        "jflash/_semantics/visibility.py",
        "full_stop = jnp.where(unbroken, jnp.minimum(full_stop, every_stop), start)",
        "full_stop = jnp.minimum(full_stop, every_stop)",
        VISIBILITY,
    ),
    Defect(
        "score_mod gets the indices of query and key exchanged",
        "jflash/_semantics/logits.py",
        "tile.head, *tile.indices, parameters.score_mod_arrays",
        "tile.head, *reversed(tile.indices), parameters.score_mod_arrays",
        EXACT,
    ),
    Defect(
        "All heads have the dropout of the first",
        "jflash/_semantics/dropout.py",
        "counted = 0 if spec.broadcast_dropout else",
        "counted = 0 if True else",
        "tests/semantics/test_dropout.py",
    ),
    Defect(
        "The log-sum-exp is without the sink",
        "jflash/_semantics/online_softmax.py",
        "lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))",
        "lse = jnp.where(empty, -jnp.inf, finite_or_zero(rows.largest) + jnp.log(jnp.where(empty, 1, rows.total)))",
        f"{PROPERTIES}::test_a_sink_is_a_key_without_a_value",
    ),
    Defect(
        "The gradient of the sinks is the first batch entry's",
        "jflash/_semantics/online_softmax.py",
        "gradient.sum(axis=0, keepdims=True)",
        "gradient[:1]",
        f"{PROPERTIES}::test_a_sink_is_a_key_without_a_value",
    ),
    Defect(
        "xla: padding in keys and values is not zeroed",
        "jflash/_backends/xla/tiling.py",
        "return zero_padding(array, tile.key[:, :, 0, 0, :, None], tile.key_lengths[:, 0])",
        "return array",
        f"{PROPERTIES}::test_what_padding_holds",
    ),
    Defect(
        "xla: rows that two blocks share count twice in dK and dV",
        "jflash/_backends/xla/recompute.py",
        "        if self.place.fresh is not None:\n",
        "        if self.place.fresh is not None and False:\n",
        "tests/backends/xla/test_tiles.py",
    ),
    Defect(
        "xla: the cotangent of the log-sum-exp is dropped",
        "jflash/_backends/xla/backward.py",
        "jnp.where(empty, 0, -residuals.d_lse)",
        "jnp.zeros_like(delta)",
        EXACT,
    ),
    Defect(
        "xla: products are summed in the call's dtype",
        "jflash/_backends/xla/tiling.py",
        "preferred_element_type=spec.accumulator)",
        "preferred_element_type=spec.dtype).astype(spec.accumulator)",
        EXACT,
    ),
    Defect(
        "xla: the tangent of the log-sum-exp is not subtracted",
        "jflash/_backends/xla/tangent.py",
        "(self.t_logits - centre)",
        "self.t_logits",
        "tests/transforms/test_derivatives.py",
    ),
    Defect(
        "Under vmap an operand is not spread where its tangent is",
        "jflash/_primitive.py",
        "whole = place in spread or ",
        "whole = mapped or ",
        "tests/transforms/test_transforms.py::test_other_modes",
    ),
    Defect(
        "vmap folds the mapped axis into the batch from behind",
        "jflash/_primitive.py",
        "return jnp.broadcast_to(array, (size, batch, *rest)).reshape(",
        "return jnp.broadcast_to(array, (size, batch, *rest)).swapaxes(0, 1).reshape(",
        "tests/transforms/test_vmap.py",
    ),
    Defect(
        "Under vmap the batch shares what it has a gradient of",
        "jflash/_primitive.py",
        "whole or (operation.sums and jnp.issubdtype(array.dtype, jnp.inexact))",
        "whole",
        "tests/transforms/test_vmap.py",
    ),
    Defect(
        "Gradients of what devices with other heads share are not summed",
        "jflash/_split.py",
        "dict.fromkeys((*self.batch, *self.heads, *self.queries, *self.keys))",
        "dict.fromkeys((*self.batch, *self.queries, *self.keys))",
        "tests/transforms/test_sharding.py::test_all_operands",
    ),
    Defect(
        "metal: no barrier between the weights and their product with the values",
        "jflash_metal/shaders/forward.h",
        BARRIER + "    if (simd_any(memory.rescale",
        "    if (simd_any(memory.rescale",
        "tests/backends/metal/test_metal_proof.py::test_unbroken",
    ),
    Defect(
        "metal: the sum of the weights is not rescaled where their reference moves",
        "jflash_metal/shaders/forward.h",
        "  row.l *= rescale;\n",
        "",
        "tests/attention/test_exactness.py::test_logits_that_rise_from_tile_to_tile",
    ),
    Defect(
        "mosaic_gpu: products begin before the tile of keys has arrived",
        "jflash/_backends/mosaic_gpu/forward_kernel.py",
        "is_masked=is_masked)\n        plgpu.barrier_wait(shared.k.full.at[slot])\n",
        "is_masked=is_masked)\n",
        f"{INTERPRETED}::test_any_tiles",
    ),
    Defect(
        "mosaic_gpu: dK is without the scale",
        "jflash/_backends/mosaic_gpu/backward_dkv.py",
        "self._store(acc_dk * base2.sums_scale(self.plan.spec), ",
        "self._store(acc_dk, ",
        f"{INTERPRETED}::test_several_items_a_cta",
    ),
    Defect(
        "mosaic_gpu: dS^T takes the place of gradients that are still being stored",
        "jflash/_backends/mosaic_gpu/backward_short.py",
        "        self._wait_for_copies()\n        plgpu.barrier_arrive(shared.ds_empty.at[0])\n",
        "        plgpu.barrier_arrive(shared.ds_empty.at[0])\n",
        f"{INTERPRETED}::test_dq_in_shared_memory",
    ),
    Defect(
        "mosaic_gpu: a query head has the keys of another group",
        "jflash/_backends/mosaic_gpu/forward_kernel.py",
        "return lax.div(head, self.plan.heads // self.plan.spec.key_heads)",
        "return lax.rem(head, self.plan.spec.key_heads)",
        f"{INTERPRETED}::test_head_groups_of_the_forward",
    ),
    Defect(
        "mosaic_gpu: keys past the end have weights in the backward",
        "jflash/_backends/nvidia/walk/tile_range.py",
        "jnp.where(row + rows > spec.key_length, first, whole[1])",
        "whole[1]",
        f"{INTERPRETED}::test_no_weight_on_keys_past_the_end",
    ),
    Defect(
        "mosaic_gpu: where the mean moves, the output's tangent does not",
        "jflash/_backends/mosaic_gpu/tangent_kernel.py",
        "sums.t_out + along_rows(sums.mean - new.mean, sums.out.shape) * sums.out",
        "sums.t_out",
        "tests/backends/mosaic_gpu/test_hopper_tangent.py::test_about_the_mean",
    ),
    Defect(
        "mosaic_gpu: all that a score_mod reads has the first one's index",
        "jflash/_backends/nvidia/tile/score_mod_reads.py",
        "indices(score_mod, batch, head, query, key, key_minus_query)[read.place]",
        "indices(score_mod, batch, head, query, key, key_minus_query)[0]",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_tables",
    ),
    Defect(
        "mosaic_gpu: query - key of a score_mod is key - query",
        "jflash/_semantics/score_mod_reads.py",
        "return [-key_minus_query]",
        "return [key_minus_query]",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_differences_are_the_tiles_own",
    ),
    Defect(
        "mosaic_gpu_mma: both blocks of a pair are scaled as the first",
        "jflash/_backends/mosaic_gpu_mma/products.py",
        "4 * (16 * number + 8 * half)",
        "4 * (8 * half)",
        "tests/backends/mosaic_gpu/test_mma_lanes.py::test_numbers_of_a_pairs_rows",
    ),
    Defect(
        "Both queries of a dropout counter have one word",
        "jflash/_semantics/dropout.py",
        "(13, 0xD35A2D97)",
        "(15, FACTORS[1])",
        "tests/semantics/test_dropout.py",
    ),
    Defect(
        "A table lacks the last of what each thread adds",
        "jflash/_backends/nvidia/threads/table.py",
        "        place = next_place\n    yield place, total, _is_wanted(o, total)\n",
        "        place = next_place\n",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_a_threads_sums",
    ),
    Defect(
        "A thread's last index may differ where all are taken for one",
        "jflash/_backends/nvidia/threads/table.py",
        "for place in index[1:]))",
        "for place in index[1:-1]))",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_a_threads_sums",
    ),
    Defect(
        "mosaic_gpu_mma: dQ of the fused backward is without the scale",
        "jflash/_backends/mosaic_gpu_mma/round_dq.py",
        " * base2.sums_scale(plan.spec)",
        "",
        "tests/backends/mosaic_gpu/test_mma_interpreted.py",
    ),
    Defect(
        "Halves come back in the order of the ring",
        "jflash/_ring.py",
        "halves = {name: self._in_order(array) for name, array in runs.items()}",
        "halves = dict(runs)",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "Dropout counts the keys of each device from 0",
        "jflash/_sequence.py",
        "first_key=first_key[None] if indexed else None",
        "first_key=None",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "Every device adds the gradient of sinks that devices share",
        "jflash/_sequence.py",
        "counted = ~empty & jnp.asarray(split.ring or split.keys.own == 0)",
        "counted = ~empty",
        f"{SEQUENCES}::test_sharded_jit",
    ),
    Defect(
        "All panels of a product are added to the first one's columns",
        "jflash/_backends/mosaic_gpu/panels.py",
        "yield accumulator.at[:, pl.ds(first, panel.shape[-1])], left, panel",
        "yield accumulator.at[:, pl.ds(0, panel.shape[-1])], left, panel",
        "tests/backends/mosaic_gpu/test_hopper_panels.py",
    ),
    Defect(
        "Warpgroups that take turns wait for no dS but that which they multiply",
        "jflash/_backends/mosaic_gpu/query_walk.py",
        "        if self.plan.tile.dq_alternates:\n            # Who",
        "        if self.plan.tile.dq_alternates and False:\n            # Who",
        "tests/backends/mosaic_gpu/test_hopper_interpreted.py::test_dq_in_shared_memory",
    ),
    Defect(
        "A head's part of a shared bias's gradient is added twice",
        "jflash/_backends/nvidia/walk/dbias_schedule.py",
        "jnp.clip(self.visits - first, 0, most)",
        "jnp.clip(self.visits - first, 0, most + 1)",
        "tests/backends/mosaic_gpu/test_shared_bias.py",
    ),
    Defect(
        "A warpgroup that leaves a tile keeps its turn",
        "jflash/_backends/mosaic_gpu/forward_kernel.py",
        "        # The turn goes round as often for each.\n        self._take_turn()\n        self._pass_turn()\n",
        "",
        "tests/backends/mosaic_gpu/test_hopper_turns.py",
    ),
]

SITE = """
import sys

# An editable installation would give the repository itself in the place of the copy.
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "_editable_skbc_jflash"]
"""


def copy(folder: Path) -> Path:
    """The files that git knows, and the emulator, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    shutil.copytree(ROOT / "jflash_metal" / "native", folder / "jflash_metal" / "native", dirs_exist_ok=True)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return folder


def failing(root: Path, *arguments: str) -> str | None:
    """The first test that fails; `None` if none does."""
    environment = {**os.environ, "JFLASH_METAL_EMULATOR": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'site'}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::\w+)?)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(done.stdout + done.stderr)
    return found[1]


def noticed(defect: Defect, *, every: bool) -> tuple[str | None, str | None]:
    """The test of the short run that fails with the defect, and of all tests."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        defect.plant(root)
        short = ["-m", "not slow"]
        by = failing(root, "-p", "no:xdist", *short, defect.first) or failing(root, "-n", "auto", *short)
        if by is None and every:
            return None, failing(root, "-n", "auto", "-m", "slow")
        return by, by


def main(every: Annotated[bool, tyro.conf.arg(name="all")] = False, only: str = "") -> None:
    """Plant each defect and print which tests notice it.

    Args:
      every: show a defect that the short run misses to the slow tests as well.
      only: those defects alone that have this in their name.
    """
    console = Console()
    table = Table("defect", "short run", *(["all tests"] if every else []), "s")
    missed = 0
    for defect in DEFECTS:
        if only not in defect.name:
            continue
        began = time.monotonic()
        short, whole = noticed(defect, every=every)
        missed += short is None
        found = [short, whole] if every else [short]
        row = [defect.name, *(test or "MISSED" for test in found), f"{time.monotonic() - began:.0f}"]
        table.add_row(*row)
        print(" | ".join(row), flush=True)
    console.print(table)
    sys.exit(f"The short run misses {missed}." if missed else 0)


if __name__ == "__main__":
    tyro.cli(main)
