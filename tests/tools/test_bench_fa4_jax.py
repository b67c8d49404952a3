"""The bench's peer fa4-jax: what it is asked for in its own words. A module of the test stands in for it."""

import dataclasses
import importlib.machinery
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_run import cover

from jflash import _platform
from jflash.bench import cases, clocks, mask_mods, peers

pytestmark = cover(0)

PEER = peers.PEERS["fa4-jax"]
FEATURES = cases.Grid((), (1024,), ("128",), (), tokens=256, dtype="bfloat16", features=()).cases()
NONE = {"causal": False, "window_size": None, "mask_mod": None}
ASKED: dict[str, dict[str, Any]] = {
    "full": NONE,
    "causal, grouped heads": NONE | {"causal": True},
    "causal, window": NONE | {"causal": True, "window_size": (15, 0)},
    "causal, 8 packed segments": NONE | {"causal": True, "mask_mod": "documents (2, 128)"},
    "decoding, grouped heads": NONE,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Put a library in fa4-jax's place, and return what it is asked for."""
    calls: list[dict[str, Any]] = []
    library = types.ModuleType("fa4_jax")
    library.__spec__ = importlib.machinery.ModuleSpec("fa4_jax", None)

    def flash_attn(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        calls.append(options)
        return q * jnp.mean(k) * jnp.mean(v)

    vars(library).update(flash_attn=flash_attn, document_mask=lambda ids: f"documents {ids.shape}")
    vars(library).update(MaskMod=type("MaskMod", (), {}), static=dataclasses.field)
    monkeypatch.setitem(sys.modules, "fa4_jax", library)
    return calls


@pytest.mark.parametrize("name", ASKED)
def test_a_case_is_asked_for_in_its_words(asked: list[dict[str, Any]], name: str):
    case = next(case for case in FEATURES if case.name == name)
    data = cases.data(case)
    assert PEER.refuses(case, [*data.arguments, *cases.options(case)]) is None
    for work in ("fwd", "fwd+bwd", "jvp"):
        PEER.prepare(case, work, data)
    assert asked[:3] == [ASKED[name]] * 3


@pytest.mark.parametrize("name", mask_mods.MASK_MODS)
def test_a_mask_mod_is_its_own_kind_of_mask(asked: list[dict[str, Any]], name: mask_mods.Name):
    case = next(case for case in FEATURES if case.mask_mod == name)
    data = cases.data(case)
    PEER.prepare(case, "fwd", data)
    PEER.load()(**data.arguments, mask_mod=mask_mods.bound(name, data.captured))  # pyright: ignore
    first, last = (options["mask_mod"] for options in asked)
    assert type(first) is type(last)
    indices = np.ix_(*map(np.arange, (case.batch, 1, case.queries, case.keys)))
    want = mask_mods.bound(name, data.captured)(*indices)
    np.testing.assert_array_equal(last(*indices), want)


@pytest.mark.usefixtures("asked")
def test_what_it_has_no_argument_for_is_refused():
    refused = {
        case.name for case in FEATURES if PEER.refuses(case, [*cases.data(case).arguments, *cases.options(case)])
    }
    assert {"bias per pair", "causal, ALiBi", "causal, sinks", "dropout of 0.1", "score_mod: scalar"} <= refused
    assert refused.isdisjoint(ASKED)


@pytest.mark.usefixtures("asked")
def test_a_mask_that_it_aligns_otherwise_is_refused():
    attention = peers.PEERS["fa4-jax"].load()  # pyright: ignore[reportAttributeAccessIssue]
    query, key = jnp.zeros((1, 4, 1, 8)), jnp.zeros((1, 8, 1, 8))
    with pytest.raises(ValueError, match="aligns a mask with the last query and key"):
        attention(query, key, key, is_causal=True)


def test_it_takes_part_where_it_is_installed_on_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch, request: Any):
    here = _platform.current()
    assert PEER.missing(here) == "fa4-jax is not installed."
    request.getfixturevalue("asked")
    assert "It needs an NVIDIA GPU" in str(PEER.missing(here))
    monkeypatch.setattr(clocks, "on_nvidia", lambda: True)
    assert PEER.missing(here) is None
