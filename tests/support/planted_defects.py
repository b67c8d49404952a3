"""Plants defects in a copy of the repository, one at a time, and shows that the tests of the short run notice each.

    python tests/support/planted_defects.py [--all] [--only WORD]

A defect names a definition, and has a piece of text that is found once in definitions of this name, in whichever files
of the packages they are, and what takes its place. Of the short run (`make test`) the tests
that are there to notice it go first, and all others after them, until one fails. What the short run notices, all tests
do, as they include it; with `--all` a defect that it misses is shown to the slow tests as well.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Defect:
    """One wrong piece of source."""

    name: str
    definition: str
    """The function, class or constant that has the text, by the end of its qualified name."""
    right: str
    wrong: str
    first: str
    """The test that is to notice it."""

    def places(self) -> list[tuple[Path, int]]:
        """Return the files that have the text in a definition of the name, and where in each it begins."""
        return [
            (path, found.start())
            for path, text in sources().items()
            if self.right in text
            for start, stop in spans(path, self.definition)
            for found in re.finditer(re.escape(self.right), text[:stop])
            if found.start() >= start
        ]

    def plant(self, root: Path) -> None:
        """Put the wrong text in the place of the right one, in a copy of the repository."""
        ((path, start),) = self.places()
        text = sources()[path]
        changed = text[:start] + self.wrong + text[start + len(self.right) :]
        (root / path.relative_to(ROOT)).write_text(changed)


@functools.cache
def sources() -> dict[Path, str]:
    """Return the text of every file in which defects are planted."""
    files = (path for package in ("jflash", "jflash_metal") for path in sorted((ROOT / package).rglob("*.*")))
    return {path: path.read_text() for path in files if path.suffix in (".py", ".h")}


def spans(path: Path, definition: str) -> list[tuple[int, int]]:
    """Return where in a file the definitions of a qualified name begin and end."""
    *_, name = definition.split(".")
    if path.suffix == ".h":
        # A function ends where a line is its closing brace alone.
        functions = re.finditer(
            rf"^[a-z][^;{{}}]* {re.escape(name)}\(.*?^}}$", sources()[path], re.MULTILINE | re.DOTALL
        )
        return [function.span() for function in functions]
    lines = [0]
    for line in sources()[path].splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = (node for name, node in definitions(ast.parse(sources()[path])) if f".{name}".endswith(f".{definition}"))
    return [(lines[node.lineno - 1], lines[node.end_lineno]) for node in found]


def definitions(scope: ast.AST, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and constants of a scope with their qualified names."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield within + node.name, node
            yield from definitions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield within + node.targets[0].id, node
        else:
            yield from definitions(node, within)


EXACT = "tests/attention/test_exactness.py::test_exact"
PROPERTIES = "tests/attention/test_properties.py"
VISIBILITY = "tests/semantics/test_visibility.py"
INTERPRETED = "tests/backends/mosaic_gpu/test_hopper_interpreted.py"
BACKWARD_TILE = "tests/backends/mosaic_gpu/test_backward_tile.py"
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
        "return zero_padding(array, tile.key[:, :, 0, 0, :, None], tile.key_lengths[:, 0])",
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
        "mosaic_gpu: products begin before the tile of keys has arrived",
        "_attend_beside_product",
        "is_masked=is_masked)\n        plgpu.barrier_wait(shared.k.full.at[slot])\n",
        "is_masked=is_masked)\n",
        f"{INTERPRETED}::test_any_tiles",
    ),
    Defect(
        "mosaic_gpu: dK is without the scale",
        "make_dk",
        "self._store(acc_dk * ",
        "self._store(acc_dk + 0 * ",
        f"{INTERPRETED}::test_any_tiles",
    ),
    Defect(
        "mosaic_gpu: dS^T takes the place of gradients that are still being stored",
        "_compute_block",
        "        self._wait_for_copies()\n        plgpu.barrier_arrive(shared.ds_empty.at[0])\n",
        "        plgpu.barrier_arrive(shared.ds_empty.at[0])\n",
        f"{INTERPRETED}::test_dq_in_shared_memory",
    ),
    Defect(
        "mosaic_gpu: a query head has the keys of another group",
        "key_head",
        "return lax.div(head, self.plan.heads // self.plan.spec.key_heads)",
        "return lax.rem(head, self.plan.spec.key_heads)",
        f"{INTERPRETED}::test_head_groups_of_the_forward",
    ),
    Defect(
        "mosaic_gpu: keys past the end have weights in the backward",
        "visited",
        "jnp.where(row + rows > spec.key_length, first, whole[1])",
        "whole[1]",
        f"{INTERPRETED}::test_no_weight_on_keys_past_the_end",
    ),
    Defect(
        "mosaic_gpu: where the mean moves, the output's tangent does not",
        "_visit",
        "sums.t_out + along_rows(sums.mean - new.mean, sums.out.shape) * sums.out",
        "sums.t_out",
        "tests/backends/mosaic_gpu/test_hopper_tangent.py::test_about_the_mean",
    ),
    Defect(
        "mosaic_gpu: all that a score_mod reads has the first one's index",
        "_index.scalar",
        "indices(score_mod, batch, head, query, key, key_minus_query)[read.place]",
        "indices(score_mod, batch, head, query, key, key_minus_query)[0]",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_tables",
    ),
    Defect(
        "mosaic_gpu: query - key of a score_mod is key - query",
        "values.compute",
        "return [-key_minus_query]",
        "return [key_minus_query]",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_differences_are_the_tiles_own",
    ),
    Defect(
        "mosaic_gpu_mma: both blocks of a pair are scaled as the first",
        "row_numbers",
        "4 * (16 * number + 8 * half)",
        "4 * (8 * half)",
        "tests/backends/mosaic_gpu/test_mma_lanes.py::test_numbers_of_a_pairs_rows",
    ),
    Defect(
        "Both queries of a dropout counter have one word",
        "SHIFTS_AND_FACTORS",
        "(13, 0xD35A2D97)",
        "(15, FACTORS[1])",
        "tests/semantics/test_dropout.py",
    ),
    Defect(
        "A table lacks the last of what each thread adds",
        "totals",
        "        place = next_place\n    yield place, total, _is_wanted(o, total)\n",
        "        place = next_place\n",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_a_threads_sums",
    ),
    Defect(
        "A thread's last index may differ where all are taken for one",
        "differences",
        "for place in index[1:]))",
        "for place in index[1:-1]))",
        "tests/backends/mosaic_gpu/test_score_mod_reads.py::test_a_threads_sums",
    ),
    Defect(
        "mosaic_gpu_mma: dQ of the fused backward is without the scale",
        "body",
        "plan.columns, plan.together) * ",
        "plan.columns, plan.together) + 0 * ",
        "tests/backends/mosaic_gpu/test_mma_interpreted.py",
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
        "All panels of a product are added to the first one's columns",
        "products",
        "yield accumulator.at[:, pl.ds(first, panel.shape[-1])], left, panel",
        "yield accumulator.at[:, pl.ds(0, panel.shape[-1])], left, panel",
        "tests/backends/mosaic_gpu/test_hopper_panels.py",
    ),
    Defect(
        "Warpgroups that take turns wait for no dS but that which they multiply",
        "_leave_dq",
        "if self.plan.tile.dq_alternates:",
        "if False:",
        "tests/backends/mosaic_gpu/test_hopper_interpreted.py::test_dq_in_shared_memory",
    ),
    Defect(
        "A head's part of a shared bias's gradient is added twice",
        "own_visits",
        "jnp.clip(self.visits - first, 0, most)",
        "jnp.clip(self.visits - first, 0, most + 1)",
        "tests/backends/mosaic_gpu/test_shared_bias.py",
    ),
    Defect(
        "A warpgroup that leaves a tile keeps its turn",
        "_leave",
        "        # The turn goes round as often for each.\n        self._take_turn()\n        self._pass_turn()\n",
        "",
        "tests/backends/mosaic_gpu/test_hopper_turns.py",
    ),
    Defect(
        "Rows have no delta subtracted from dP",
        "d_logits",
        "return p * (dp - delta)",
        "return p * dp",
        BACKWARD_TILE,
    ),
    Defect(
        "dS of what dropout drops has the wrong sign",
        "d_logits",
        "jnp.abs(p) * (dp",
        "p * (dp",
        BACKWARD_TILE,
    ),
    Defect(
        "dP of what dropout drops is not 0",
        "d_logits",
        "jnp.where(p > 0, 1 / (1 - spec.dropout_rate), 0.0)",
        "1 / (1 - spec.dropout_rate)",
        BACKWARD_TILE,
    ),
    Defect(
        "dV has what dropout drops",
        "kept",
        "jnp.maximum(p, 0.0)",
        "jnp.abs(p)",
        BACKWARD_TILE,
    ),
    Defect(
        "dV is not scaled for what dropout drops",
        "scaled",
        "values * (1 / (1 - spec.dropout_rate))",
        "values",
        BACKWARD_TILE,
    ),
    Defect(
        "The backward forgets the probabilities that dropout drops",
        "BackwardTile.of",
        "dropped.signed(",
        "dropped.keep(",
        BACKWARD_TILE,
    ),
    Defect(
        "Keys that a query does not see have weights in the backward",
        "differentiate",
        "return mask.hide(probabilities(logits), 0.0), _lowerable(pull_back)",
        "return probabilities(logits), _lowerable(pull_back)",
        BACKWARD_TILE,
    ),
    Defect(
        "Reads of a score_mod have no gradient",
        "_modification.modify",
        "values.get(read_name(place), read)",
        "read",
        BACKWARD_TILE,
    ),
    Defect(
        "The slope of a soft cap is that at 0",
        "soft_cap",
        "cap * form.unit - result * result * (form.unit / cap)",
        "cap * form.unit",
        BACKWARD_TILE,
    ),
    Defect(
        "Logits that have to be exact become powers of 2",
        "Exponent.__call__",
        "jnp.exp2((logits - reference) * self.factor)",
        "jnp.exp2(logits - reference)",
        BACKWARD_TILE,
    ),
    Defect(
        "Gradients of parameters are summed along columns",
        "ParameterSums.added",
        "gradients[name].sum(axis=1)",
        "gradients[name].sum(axis=0)",
        BACKWARD_TILE,
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
