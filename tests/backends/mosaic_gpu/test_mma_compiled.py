"""The kernels by `mma.sync` compiled for the GPUs that they serve, without one: registers spilled, by a written list.

And what is compiled, in an emulator of PTX: right, with every read and write in bounds and after what it waits for.
"""

import json
from pathlib import Path

import compilers_wheels
import pytest

from jflash._backends.mosaic_gpu_mma.shared_memory import SHARED_MEMORY

SPILLS = {
    "mma_forward": (
        260,
        "d128, O and S of two blocks of 64 rows; with one, which spills nothing, an H100 is 1 to 3% slower.",
    ),
    "mma_d_query": (100, "d128, likewise."),
    "mma_d_key_d_value": (260, "d128, dK, dV and two tiles; with tiles of 32 queries, which spill less, 2% slower."),
    "mma_d_key": (60, "d256, dK and two tiles."),
    "mma_d_value": (60, "d256, dV and a tile."),
}
"""The most bytes that a kernel may spill, in any case, and where that is."""

EMULATED = [
    dict(dtype="bfloat16", dims=(64, 64), bias="full", mask="full", dropout=True, lengths="both", key_length=140),
    dict(dtype="float16", dims=(33, 40), bias="keys", soft_cap=1.5, segments="sorted", alibi=True, scale="traced"),
    dict(dtype="bfloat16", dims=(256, 256), mask="full", causal=True, score_mod="indices", bias="full", batch=()),
    dict(dtype="bfloat16", dims=(128, 128), causal=True, offset="end", sinks=True, key_length=140, heads=(1, 1)),
    dict(dtype="bfloat16", dims=(80, 80), soft_cap=40.0, window=(40, 10), bias="queries", batch=(), heads=(2, 2)),
    dict(dtype="float16", dims=(192, 128), mask="keys", dropout=True, bias="keys", sinks=True, batch=()),
    dict(dtype="bfloat16", dims=(64, 64), query_length=3, key_length=700, heads=(4, 2), lengths="keys", batch=()),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_spills(capability: str, tmp_path: Path):
    reports = compilers_wheels.run("mma_compile.py", tmp_path, capability)
    targets = {report["target"].rstrip("a") for report in reports.values()}
    assert targets == {f"sm_{capability.replace('.', '')}"}
    over = {
        name: report["spills"]
        for name, report in reports.items()
        if report["spills"] > SPILLS.get(name.split(": ")[1], (0, ""))[0]
    }
    assert not over


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.0", "8.6"])
def test_emulated(capability: str, tmp_path: Path):
    """Two budgets of shared memory."""
    rows = [dict(query_length=70, key_length=100) | row for row in EMULATED]
    found = compilers_wheels.run("mma_emulate.py", tmp_path, capability, *map(json.dumps, rows))
    assert not {str(row): message for row, message in zip(EMULATED, found, strict=True) if message}
