"""The kernels by `mma.sync` compiled for the GPUs that they serve, without one: registers spilled, by a written list.

And what is compiled, in an emulator of PTX: right, with every read and write in bounds and after what it waits for.
"""

import json
from pathlib import Path

import compilers_wheels
import pytest
from short_run import cover

from jflash._backends.mosaic_gpu_mma import SHARED_MEMORY

SPILLS = {
    "mma_forward": (
        {8: 104, 9: 124, 10: 496},
        "d128, where it holds O and S of two blocks of 64 rows, and a bias, or what is read of a table too. Without a "
        "bias it spills 80 bytes; one block, which spills nothing, is 3% slower.",
    ),
    "mma_backward": (
        {8: 196, 9: 220, 10: 456},
        "d128, where it holds dK, dV, two tiles, and the gradients of ALiBi's slopes and of the scale. Not measured.",
    ),
    "mma_d_query": (
        {8: 92, 9: 116, 10: 312},
        "d128, likewise dQ and two tiles of two blocks. With one block, which spills nothing, it is 1% slower.",
    ),
    "mma_d_key_d_value": (
        {8: 64, 9: 76, 10: 272},
        "d128, where it holds dK, dV and two tiles. With tiles of 32 queries, which spill less, it is 2% slower.",
    ),
    "d256 causal, dropout: mma_d_value": ({8: 0, 9: 0, 10: 52}, "It keeps a head's two words. Not measured."),
    "bias, score_mod of a table: mma_d_bias": ({8: 0, 9: 0, 10: 4}, "d128. Not measured."),
}
"""The most bytes that a kernel, of one case or of all, may spill, by the compute capability's major number, where that
is, and what was measured causal (one H100, jax 0.11.2). 12.x has what 10.x has."""

SPILLS_OF_FLOAT32 = {
    "mma_forward": {8: 320, 9: 336, 10: 224},
    "mma_d_query": {8: 116, 9: 92, 10: 432},
    "mma_d_key_d_value": {8: 76, 9: 88, 10: 316},
    "mma_d_key": {8: 96, 9: 120, 10: 308},
    "mma_d_value": {8: 24, 9: 28, 10: 236},
    "mma_d_bias": {8: 28, 9: 40, 10: 40},
}
"""The bytes that float32 may spill; nothing was measured. Most spill with 256 columns, whose sums are half of the
registers."""

DECODING = dict(dtype="bfloat16", query_length=3, key_length=100, dims=(40, 40), heads=(4, 2), batch=(3,))

EMULATED = [
    dict(dtype="bfloat16", dims=(64, 64), bias="full", mask="full", dropout=True, lengths="both", key_length=140),
    dict(dtype="float16", dims=(33, 40), bias="keys", soft_cap=1.5, segments="sorted", alibi=True, scale="traced"),
    dict(dtype="bfloat16", dims=(256, 256), mask="full", causal=True, score_mod="indices", bias="full", batch=()),
    dict(dtype="bfloat16", dims=(128, 128), causal=True, offset="end", sinks=True, key_length=140, heads=(1, 1)),
    dict(dtype="bfloat16", dims=(80, 80), soft_cap=40.0, window=(40, 10), bias="queries", batch=(), heads=(2, 2)),
    dict(dtype="float16", dims=(64, 64), causal=True, bias="keys", segments="sorted", deterministic=True),
    dict(dtype="float16", dims=(192, 128), mask="keys", dropout=True, bias="keys", sinks=True, batch=()),
    dict(dtype="bfloat16", dims=(64, 64), causal=True, score_mod="arrays", heads=(2, 1)),
    dict(dtype="float16", dims=(192, 128), score_mod="arrays", bias="full", dropout=True, lengths="both", batch=()),
    dict(dtype="bfloat16", dims=(64, 64), query_length=3, key_length=700, heads=(4, 2), lengths="keys", batch=()),
    # The output in pairs of blocks, and where there is least shared memory in one.
    dict(dtype="bfloat16", dims=(256, 256), causal=True, sinks=True, key_length=140, heads=(1, 1), batch=()),
    # Tiles of 128 keys.
    dict(dtype="bfloat16", dims=(64, 64), causal=True, offset="end", key_length=300, lengths="both", batch=()),
    dict(dtype="float32", dims=(64, 64), bias="full", mask="full", dropout=True, causal=True, batch=()),
    dict(dtype="float32", dims=(33, 40), bias="keys", soft_cap=1.5, lengths="both", score_mod="indices", batch=()),
    # One tile, before which all sums are one register's zero.
    dict(
        **dict(dtype="float32", query_length=13, key_length=17, dims=(64, 64), heads=(1, 1)),
        **dict(scale="traced", causal=True, lengths="queries"),
    ),
    dict(dtype="float32", dims=(40, 64), precision="highest", segments="sorted", bias="queries", alibi=True, batch=()),
    # As wide as there is room for where there is least shared memory.
    dict(dtype="float32", dims=(90, 108), precision="highest", bias="full", heads=(1, 1), batch=()),
    dict(dtype="float32", dims=(150, 144), causal=True, score_mod="arrays", lengths="both", heads=(1, 1), batch=()),
    # Keys and values from pages, as they are and converted; with the least shared memory in one stage.
    dict(**(DECODING | dict(dims=(256, 256), batch=())), pages=dict(page_size=16)),
    dict(**dict(DECODING, key_length=600, dims=(64, 64), batch=(4,)), pages=dict(page_size=12)),
    dict(**DECODING, pages=dict(page_size=16, interleaved=True, dtype="float8_e4m3fn")),
    dict(**(DECODING | dict(dims=(128, 64))), pages=dict(page_size=16, dtype="int8", scaled_by_page=False)),
    dict(**(DECODING | dict(dtype="float32", precision="highest")), pages=dict(page_size=1, dtype="int8")),
    # Lists of tiles, of which one is not visited.
    dict(dtype="bfloat16", key_length=140, dims=(64, 64), heads=(1, 1), mask_mod="documents"),
]


@cover(0)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_spills(capability: str, tmp_path: Path):
    reports = compilers_wheels.run("mma_compile.py", tmp_path, capability)
    targets = {report["target"].rstrip("a") for report in reports.values()}
    assert targets == {f"sm_{capability.replace('.', '')}"}
    major = min(int(capability.split(".")[0]), 10)
    listed = {kernel: most[major] for kernel, (most, _) in SPILLS.items()}
    listed_of_float32 = {kernel: by_major[major] for kernel, by_major in SPILLS_OF_FLOAT32.items()}
    over: dict[str, int] = {}
    for name, report in reports.items():
        case, kernel = name.split(": ")
        allowed = listed_of_float32 if case.startswith("float32") else listed
        if report["spills"] > allowed.get(name, allowed.get(kernel, 0)):
            over[name] = report["spills"]
    assert not over


@cover(0)
@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0"])
def test_emulated(capability: str, tmp_path: Path):
    """Three budgets of shared memory; four numbers are added at once on the last."""
    rows = [dict(query_length=70, key_length=100) | row for row in EMULATED]
    found = compilers_wheels.run("mma_emulate.py", tmp_path, capability, *map(json.dumps, rows))
    assert not {str(row): message for row, message in zip(EMULATED, found, strict=True) if message}
