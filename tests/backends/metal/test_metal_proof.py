"""Mutation tests: break the real shaders, one piece at a time, and check that every break is caught.

A break counts as caught when the emulator rejects a launch, or a result leaves its tolerance. A missing barrier and too
much threadgroup memory must be caught by the emulator itself: on a GPU they may give right results for a while.
"""

import dataclasses
import functools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import paged
import pytest
from cases import Case
from metal_shader import MISSING, SCHEDULES
from plain_attention import Results
from short_run import cover

import jflash
from jflash_metal import _ffi, _source

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SMALL = cases.EVERYTHING._replace(query_length=40, key_length=44, dims=(12, 18), window=(20, 0), dropout=False)
"""Nearly every feature, in blocks that hold keys and values at once."""
WIDE = Case(query_length=20, key_length=20, heads=(2, 1), dims=(256, 256), batch=(1,), bias="full")
"""Blocks of fewer rows, which hold keys and values in turn."""
CALLS = {
    "small": SMALL,
    "wide": WIDE,
    "small_shared_bias": SMALL._replace(mask="keys", segments="unsorted"),
    "wide_shared_bias": WIDE,
    "by_row_and_column": SMALL._replace(mask="queries", bias="keys", segments=None),
    "by_row": SMALL._replace(mask=None, bias="queries", segments="unsorted", window=None, causal=False),
    "listed_shared_bias": Case(query_length=150, key_length=290, dims=(8, 8), batch=(1,), bias="full"),
    "paged": SMALL._replace(bias=None, mask=None, segments=None, lengths="keys"),
}


UNSEEING = 3
"""The query that a mask hides from all keys."""


@functools.cache
def call_of(name: str) -> oracle.Call:
    call = cases.build(CALLS[name])
    if call.mask is not None:
        call = dataclasses.replace(call, mask=call.mask & (np.arange(call.mask.shape[-2])[:, None] != UNSEEING))
    if name.endswith("shared_bias"):
        call = dataclasses.replace(call, bias=call.bias[:1, :1])
    if name.startswith("listed"):
        call = dataclasses.replace(call, mask_mod=tiles_of_all_kinds)
    return cases.of_forward(call) if name == "paged" else call


def tiles_of_all_kinds(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Show the first rows one whole tile, and other rows a third of two."""
    return jnp.where(query < 128, key // 128 == 1, (key // 128 != 1) & ((query + key) % 3 == 0))


def results_of(name: str) -> Results:
    attention, call = functools.partial(jflash.attention, implementation="metal"), call_of(name)
    if name != "paged":
        return oracle.run(attention, with_nan_where_nothing_is_seen(call))
    arguments = paged.paginate(call, 8) | dict(k_scale=1.0, v_scale=1.0)
    return jax.block_until_ready(Results(*attention(**arguments, return_residual=True), {}))


def with_nan_where_nothing_is_seen(call: oracle.Call) -> oracle.Call:
    """The call with NaN as the cotangents of queries that see no key, which reach no gradient."""
    hidden = np.isneginf(oracle.exact(call).lse)
    d_out, d_lse = np.where(hidden[..., None], np.nan, call.d_out), np.where(hidden, np.nan, call.d_lse)
    return dataclasses.replace(call, d_out=d_out.astype(call.d_out.dtype), d_lse=d_lse.astype(call.d_lse.dtype))


def outcome(name: str) -> str | None:
    """Return how a call's failure shows: "rejected: ..." or "wrong: ..."; None: it does not fail."""
    call = call_of(name)
    jax.clear_caches()  # the shaders are read when a call is traced
    try:
        oracle.assert_right(results_of(name), call)
    except jax.errors.JaxRuntimeError as error:
        return f"rejected: {error}"
    except AssertionError as error:
        return f"wrong: {error}"
    return None


@dataclasses.dataclass(frozen=True)
class Break:
    """A piece of a shader file, and what takes its place."""

    file: str
    start: int
    stop: int
    replacement: str
    calls: Sequence[str] = tuple(CALLS)

    def __str__(self) -> str:
        text = (_source.SHADERS / self.file).read_text()
        line = text.count("\n", 0, self.start) + 1
        return f"{self.file}:{line}:{self.start - text.rfind(chr(10), 0, self.start)}"

    def outcomes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """Return the outcomes of the calls that fail, one after the other."""
        shutil.copytree(_source.SHADERS, folder, dirs_exist_ok=True)
        text = (folder / self.file).read_text()
        (folder / self.file).write_text(text[: self.start] + self.replacement + text[self.stop :])
        monkeypatch.setattr(_source, "SHADERS", folder)
        return filter(None, map(outcome, self.calls))


def breaks(pattern: str, replacement: str, files: str = "*", calls: Sequence[str] = tuple(CALLS)) -> list[Break]:
    """One for each match in the shaders; the replacement may refer to groups."""
    return [
        Break(path.name, match.start(), match.end(), match.expand(replacement), calls)
        for path in sorted(_source.SHADERS.glob(files))
        for match in re.finditer(pattern, path.read_text())
    ]


def some(breaks: list[Break]) -> list[Break]:
    """A quarter of them; with the deep profile all."""
    return breaks if hypothesis.settings.get_current_profile_name() == "deep" else breaks[::4]


BARRIERS = breaks(r"(threadgroup|simdgroup)_barrier\(.*?\);", ";")
DECLARATIONS = r"(?m)^  (threadgroup \w+ \w+)\[(.+)\];"
OVERSIZED = breaks(DECLARATIONS, r"\1[\2 + 8192];", "*.metal")
UNDERSIZED = breaks(DECLARATIONS, r"\1[(\2) / 2];", "*.metal")
MASKS = breaks(r"result = result && .*;", ";", "visibility.h") + breaks(
    r"query < head.query_limit && key < head.key_limit", "true", "visibility.h"
)
ONLY_IN = {"pages.h": ("paged",), "tile_mask.h": ("listed_shared_bias",), "walk.h": ("listed_shared_bias",)}
"""The call that goes through a file, where others do not."""
INDICES = [
    dataclasses.replace(one, calls=ONLY_IN.get(one.file, one.calls))
    for one in breaks(r"(?<=\w)\[(?![A-Z_]+\])([^\[\]\n]+)\](?! *\))(?!;)", r"[(\1) + 1]", "*.h")
]
"""Subscripts that are one too large. A constant alone is an array's size, which may be larger."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("small", "listed_shared_bias") else cover(0)) for name in CALLS]
)
def test_unbroken(name: str) -> None:
    assert outcome(name) is None


@cover(0)
@pytest.mark.parametrize("name", CALLS)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    first, *others = (by_schedule(name, seed) for seed in SCHEDULES)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def by_schedule(name: str, seed: int) -> Results:
    _ffi.set_schedule(seed)
    return jax.block_until_ready(results_of(name))


def test_there_is_something_to_break() -> None:
    assert len(BARRIERS) > 20
    assert len(MASKS) > 5
    assert len(OVERSIZED) == len(UNDERSIZED) > 20
    assert len(INDICES) > 50


@cover(every=100, rest=2)
@pytest.mark.parametrize("one", BARRIERS, ids=str)
def test_missing_barrier(one: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(one.outcomes(tmp_path, monkeypatch), "not caught")
    assert re.match(r"rejected: INTERNAL: Metal emulator, kernel \w+: (race|uninitialised read)", found), found


@cover(every=100, rest=2)
@pytest.mark.parametrize("one", OVERSIZED, ids=str)
def test_too_much_threadgroup_memory(one: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(one.outcomes(tmp_path, monkeypatch), "not caught")
    assert re.search(r"the kernel holds \d+ bytes of it; the limit is 32768", found), found


@cover(every=100)
@pytest.mark.parametrize("one", some(UNDERSIZED), ids=str)
def test_too_little_threadgroup_memory(one: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(one.outcomes(tmp_path, monkeypatch), "not caught")
    assert re.match("rejected: INTERNAL: Metal emulator, kernel .* out of bounds", found), found


@cover(every=100)
@pytest.mark.parametrize("one", MASKS, ids=str)
def test_missing_mask(one: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(one.outcomes(tmp_path, monkeypatch), "not caught")
    assert found.startswith(("wrong", "rejected")), found


@cover(every=100, rest=2)
@pytest.mark.parametrize("one", some(INDICES), ids=str)
def test_wrong_index(one: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(one.outcomes(tmp_path, monkeypatch), "not caught")
    assert found.startswith(("wrong", "rejected")), found
