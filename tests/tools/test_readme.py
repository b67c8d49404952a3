"""Tests that README is short and true: its code runs, its links lead somewhere, its table is what backends say."""

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import H200
from short_run import cover

from jflash import _api, _canonical, _dispatch
from jflash._platform import Platform
from jflash._semantics.spec import Spec
from jflash_metal import _ffi

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
IMPLEMENTATIONS = (ROOT / "examples" / "implementations.md").read_text()
PAGES = [
    *ROOT.glob("*.md"),
    *(page for part in (".github", "csrc", "examples") for page in (ROOT / part).rglob("*.md")),
]

SINCE_AMPERE = [Platform("gpu", "NVIDIA", capability, 108) for capability in ("8.0", "8.6", "8.7", "8.9", "12.0")]
BLACKWELL = [Platform("gpu", "NVIDIA", capability, 148) for capability in ("10.0", "10.3")]
COLUMNS = {
    "NVIDIA Hopper": (None, [H200]),
    "NVIDIA Blackwell (10.x)": (None, BLACKWELL),
    "other NVIDIA since Ampere": (None, SINCE_AMPERE),
    "other GPUs": (None, [Platform("gpu", "NVIDIA", "7.5"), Platform("gpu", "AMD", "gfx942")]),
    "Apple GPUs, by name": (("metal", "xla"), [Platform(name, name, None) for name in ("cpu", "mtl")]),
    "CPU, TPU, others": (None, [Platform(name, name, None) for name in ("cpu", "tpu", "mtl", "METAL", "mps")]),
}
"""For each column the `implementation` that is asked for, and machines that are all served alike."""

ZEROS = np.zeros(2, np.float32)
WHOLE = dict(
    bias=np.zeros((4, 4), np.float32),
    mask=np.ones((4, 4), bool),
    scale=0.5,
    is_causal=True,
    query_seq_lengths=np.array([4, 3]),
    key_value_seq_lengths=np.array([3, 4]),
    local_window_size=(2, 0),
    logits_soft_cap=2.0,
    alibi_slopes=ZEROS,
    query_offset=1,
    segment_ids=np.zeros((2, 4), np.int32),
    sinks=ZEROS,
    precision="high",
)
IN_CUDNN = ("scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size", "precision")
CLOSED = dict(score_mod=lambda logit, batch, head, query, key: logit * jnp.asarray(ZEROS)[head])
TABLE = dict(score_mod=lambda logit, batch, head, query, key: logit + jnp.asarray(ZEROS)[(query - key) & 1])
REFUSED_BY_XLA = dict(**CLOSED, deterministic=True)
"""Options that `xla` refuses on a GPU."""
PAGED = dict(page_table=np.zeros((2, 1), np.int32), key_value_seq_lengths=np.array([3, 4]))
DROPOUT = dict(dropout_rate=0.1, dropout_key=jax.random.key(0), broadcast_dropout=True)

ROWS: dict[str, list[dict[str, Any]]] = {
    "bfloat16 or float16": [dict(dtype=jnp.bfloat16), dict(dtype=jnp.float16)],
    "float32 whose head dimensions, in multiples of 16, add up to at most 304": [
        dict(dtype=jnp.float32),
        *(dict(dtype=jnp.float32, head_dim=dim, value_dim=304 - dim) for dim in (144, 256)),
        *(dict(dtype=jnp.float32, head_dim=dim, value_dim=208 - dim, precision="highest") for dim in (96, 192)),
    ],
    'float32 with `precision="highest"` and head dimensions of more than 480 together': [
        dict(dtype=jnp.float32, head_dim=256, value_dim=dim, precision="highest") for dim in (240, 256)
    ],
    'float32 with `precision="highest"` and a soft cap': [
        dict(dtype=jnp.float32, precision="highest", logits_soft_cap=2.0),
    ],
    "float64": [dict(dtype=jnp.float64)],
    "a `mask_mod`": [
        dict(mask_mod=lambda batch, head, query, key: key <= query + head),
        dict(mask_mod=lambda batch, head, query, key: jnp.asarray(ZEROS)[head] < key, dtype=jnp.bfloat16),
    ],
    "a `mask_mod` that takes more than 16 numbers of an array at once": [
        dict(mask_mod=lambda batch, head, query, key: jnp.any(jnp.arange(17) == key), dtype=jnp.bfloat16),
    ],
    "causality, windows to the left, padding, grouped heads, heads of a multiple of 8 up to 128": [
        *({name: WHOLE[name]} for name in IN_CUDNN),
        dict(is_causal=True, query_seq_lengths=WHOLE["query_seq_lengths"], local_window_size=(2, 1)),
        *(dict(head_dim=size, value_dim=size) for size in (80, 128)),
        dict(key_heads=2),
    ],
    "masks, other windows, segments, biases, sinks, other heads up to 256, odd lengths, any option without a row": [
        WHOLE,
        dict(deterministic=True),
        *({name: value} for name, value in WHOLE.items() if name not in (*IN_CUDNN, "query_offset")),
        dict(query_offset=1, is_causal=True),
        dict(local_window_size=(2, 1)),
        *(dict(head_dim=size) for size in (1, 80, 256)),
        *(dict(head_dim=size, value_dim=size) for size in (4, 136, 256)),
        dict(length=5),
    ],
    "`dropout_rate`": [DROPOUT],
    "`score_mod`": [dict(score_mod=lambda logit, batch, head, query, key: logit * 2)],
    "`score_mod` that closes over arrays": [
        CLOSED,
        TABLE,
        *(dict(**mod, derivative="backward") for mod in (CLOSED, TABLE)),
    ],
    "`score_mod` that closes over arrays, with `deterministic=True`": [REFUSED_BY_XLA],
    "`score_mod` that closes over arrays at an index computed from positions, with `deterministic=True`": [
        dict(**TABLE, deterministic=True)
    ],
    "a head dimension of 257 to 576": [
        *(dict(dtype=jnp.bfloat16, **{name: dim}) for name in ("head_dim", "value_dim") for dim in (257, 576)),
        dict(dtype=jnp.float16, head_dim=576, value_dim=512, **WHOLE),
        dict(dtype=jnp.float16, head_dim=576, value_dim=512, **DROPOUT),
        *(
            dict(dtype=jnp.float32, **dims)
            for dims in (dict(head_dim=257), dict(value_dim=544), dict(head_dim=288, value_dim=288))
        ),
    ],
    "a head dimension above 576; in float32 more than 576 together; in `jax.jvp` the keys' above 432, in float32 192, "
    'with `precision="highest"` 128': [
        dict(head_dim=577),
        dict(value_dim=577),
        *(dict(dtype=jnp.float32, head_dim=dim, value_dim=289) for dim in (257, 576)),
        *(dict(derivative="tangent", dtype=jnp.bfloat16, head_dim=dim) for dim in (433, 576)),
        *(dict(derivative="tangent", dtype=jnp.float32, head_dim=dim) for dim in (193, 544)),
        *(dict(derivative="tangent", dtype=jnp.float32, head_dim=dim, precision="highest") for dim in (129, 192)),
    ],
    "`page_table`: a paged cache in bfloat16 or float16, in pages of 8, 16 or 32 keys or a multiple of 64, heads of a "
    "multiple of 16, without derivatives": [
        *(dict(**PAGED, dtype=jnp.bfloat16, head_dim=16, value_dim=16, length=size) for size in (16, 32, 64, 192)),
        dict(**PAGED, dtype=jnp.bfloat16, head_dim=80, value_dim=80, length=8),
        dict(**PAGED, dtype=jnp.float16, head_dim=256, value_dim=256, length=128, is_causal=True),
    ],
    "a paged cache in 8 bits, or with `k_scale` or `v_scale`, heads of a multiple of 32 up to 256, in pages of 32 keys "
    "or a multiple of 64; of 16 where 64 divides H and D": [
        dict(**PAGED, dtype=jnp.bfloat16, head_dim=32, value_dim=32, length=32, k_scale=2.0),
        dict(**PAGED, dtype=jnp.bfloat16, head_dim=256, value_dim=256, length=64, v_scale=2.0),
        dict(**PAGED, dtype=jnp.float16, head_dim=128, value_dim=64, length=16, k_scale=2.0, v_scale=ZEROS[:1]),
    ],
    "a paged cache in pages of other sizes or in float32; in 8 bits, or with `k_scale` or `v_scale`, whose H or D is "
    "no multiple of 32": [
        PAGED,
        dict(**PAGED, length=96),
        dict(**PAGED, length=16, k_scale=2.0, v_scale=ZEROS[:1]),
        dict(**PAGED, length=16, dtype=jnp.float32),
    ],
    "a paged cache whose H or D is no multiple of 8": [dict(**PAGED, head_dim=12), dict(**PAGED, value_dim=20)],
    "sequences split over devices": [
        dict(sequence_axis="context", sequence_strategy=name) for name in (None, "ring", "all_to_all", "gather")
    ],
    "a gradient": [dict(derivative="backward")],
    "`jax.jvp`": [
        dict(derivative="tangent"),
        *(dict(derivative="tangent", dtype=jnp.bfloat16, head_dim=dim, value_dim=512) for dim in (257, 432)),
        dict(derivative="tangent", dtype=jnp.float32, head_dim=192, value_dim=384),
        dict(derivative="tangent", dtype=jnp.float32, head_dim=128, value_dim=256, precision="highest"),
    ],
    "derivatives of second and higher order": [dict(derivative="all others")],
}
"""The calls of each row of the whole table: what they have besides bfloat16 and heads of 8."""
SUMMARY: dict[str, list[str]] = {
    "bfloat16 or float16, causal or with a window to the left, padded, heads up to 128, its gradient": [
        "bfloat16 or float16",
        "causality, windows to the left, padding, grouped heads, heads of a multiple of 8 up to 128",
        "a gradient",
    ],
    "float32, any mask, window or bias, a `mask_mod`, a paged cache (`page_table`), sequences split over devices": [
        "float32 whose head dimensions, in multiples of 16, add up to at most 304",
        "a `mask_mod`",
        next(label for label in ROWS if label.startswith("`page_table`: a paged cache")),
        "masks, other windows, segments, biases, sinks, other heads up to 256, odd lengths, any option without a row",
        "sequences split over devices",
    ],
    "`dropout_rate` or `score_mod`": ["`dropout_rate`", "`score_mod`", "`score_mod` that closes over arrays"],
    "a head dimension of 257 to 576, or `jax.jvp`": ["a head dimension of 257 to 576", "`jax.jvp`"],
    "float64, a head dimension above 576, derivatives of second and higher order": [
        "float64",
        next(label for label in ROWS if label.startswith("a head dimension above 576")),
        "derivatives of second and higher order",
    ],
}
"""The rows of README's table: each sums up rows of the whole one."""
ORDER = ("mosaic_gpu", "cudnn", "mosaic_gpu_mma", "metal", "xla", "reference")


@pytest.fixture(autouse=True)
def everything_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tables are for machines with the native library, and for processes that have float64."""
    monkeypatch.setattr(_ffi, "available", lambda: None)
    with jax.enable_x64(True):
        yield


def spec_of(
    dtype: Any = jnp.bfloat16,
    head_dim: int = 8,
    value_dim: int = 8,
    key_heads: int = 1,
    length: int = 4,
    sequence_axis: str | None = None,
    sequence_strategy: str | None = None,
    **options: Any,
) -> Spec:
    heads = dict(query=(2, head_dim), key=(key_heads, head_dim), value=(key_heads, value_dim))
    shapes = {name: (2, length, *sizes) for name, sizes in heads.items()}
    arrays = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    spec, *_ = _canonical.canonicalize(**_api._with_functions_traced({**arrays, **options}))
    if sequence_axis is None:
        return spec
    # As each device calls its backend.
    return dataclasses.replace(spec, sequence_axes=(sequence_axis,), sequence_strategy=sequence_strategy, partial=True)


def served(column: str, derivative: str = "", **call: Any) -> str:
    """Return the implementation that serves, or whose derivative serves, on all machines of the column."""
    implementation, platforms = COLUMNS[column]
    names = _dispatch.candidates(implementation)
    spec = spec_of(**call)
    (name,) = {_dispatch.ask(spec, names, platform)[0] for platform in platforms}
    assert name is not None
    by = re.search(rf"{derivative} by (\w+)", _dispatch.derivatives(name, spec)) if derivative else None
    return name if by is None else by[1]


def cells(label: str) -> list[str]:
    """Return what serves a row of the whole table in each column, the same for all of its calls."""
    each = [{served(column, **call) for call in ROWS[label]} for column in COLUMNS]
    assert [len(names) for names in each] == [1] * len(COLUMNS), label
    return [name for (name,) in each]


def assert_table(section: str, rows: dict[str, list[str]]) -> None:
    lines = [f"| a call with | {' | '.join(COLUMNS)} |", f"|{'---|' * (1 + len(COLUMNS))}"]
    lines += [f"| {label} | {' | '.join(f'`{name}`' for name in names)} |" for label, names in rows.items()]
    assert [line for line in section.splitlines() if line.startswith("|")] == lines


def test_whole_table() -> None:
    """Each cell is what `unsupported()` says of every call of its row."""
    section = IMPLEMENTATIONS.split("## What serves each call\n")[1].split("\n## ")[0]
    assert_table(section, {label: cells(label) for label in ROWS})


def test_readme_table() -> None:
    """Each row has the cells of all rows that it sums up, and what serves comes later in the order from row to row."""
    summary: dict[str, list[str]] = {}
    for label, labels in SUMMARY.items():
        (found,) = {tuple(cells(one)) for one in labels}
        summary[label] = list(found)
    for column in zip(*summary.values(), strict=True):
        assert sorted(column, key=ORDER.index) == list(column)
    assert_table(README.split("## What serves a call\n")[1].split("\n## ")[0], summary)


def test_support_table_has_every_option() -> None:
    named = functools.reduce(operator.or_, (set(call) for calls in ROWS.values() for call in calls))
    of_every_backend = {"implementation", "residual_checkpoint_name"}
    assert {*_api.Options.__annotations__, "bias", "mask"} - of_every_backend <= named


@cover(every=6)
@pytest.mark.parametrize("column", COLUMNS)
def test_support_of_two_rows_is_that_of_the_later(column: str) -> None:
    for one, other in itertools.combinations([call for calls in ROWS.values() for call in calls[:1]], 2):
        # A call with pages has no derivative.
        if not one.keys() & other.keys() and not {"page_table", "derivative"} <= {*one, *other}:
            each = [served(column, **call) for call in (one, other)]
            last = max(each, key=ORDER.index)
            both = {**one, **other}
            if last == "xla" and "NVIDIA" in column and {*REFUSED_BY_XLA} <= {*both} and "derivative" not in both:
                last = "reference"
            if last == "mosaic_gpu_mma" and max(both.get("head_dim", 8), both.get("value_dim", 8)) > 256:
                # Hopper's kernels have no such pages, and these no such heads.
                last = "xla"
            assert served(column, **both) == last, (one, other)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


RULE = (
    "at most twice that of plain attention in the call's own dtype, and a few roundings",
    "what knowing only output and log-sum-exp costs",
    "where logits are in the hundreds or more",
    "all keys share beside a `score_mod`",
    "plain attention with products in TF32",
)


@pytest.mark.parametrize("page", ["README.md", "examples/limits.md", "tests/support/oracle.py"])
def test_rule_of_errors_is_in_the_same_words(page: str) -> None:
    """What README promises of errors is what the tests hold every implementation to."""
    text = " ".join((ROOT / page).read_text().split())
    assert [words for words in RULE if words not in text] == []


@cover(every=3)
@pytest.mark.parametrize("page", ["README.md", "examples/derivatives.md", "examples/rematerialization.md"])
def test_code_runs(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    with jax.enable_x64(False):
        exec("".join(blocks), {})


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^) ]+)[^)]*\)", page.read_text()):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_can_be_found() -> None:
    """Every page is reached from README, link by link."""
    found, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        found.add(page)
        links = re.findall(r"\]\(([^)# ]+\.md)", page.read_text())
        new |= {(page.parent / link).resolve() for link in links} - found
    assert set(PAGES) <= found
