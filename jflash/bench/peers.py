"""The libraries that are measured."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
from jaxtyping import Array

import jflash
from jflash import _dispatch, _versions
from jflash._platform import Platform
from jflash.bench import in_torch, mask_mods
from jflash.bench.cases import Case, Data, Work
from jflash.bench.clocks import Prepared
from jflash.bench.in_jax import InJax

Name = Literal[
    "jflash",
    "jax.nn",
    "cuDNN",
    "tokamax",
    "fa4-jax",
    "torch",
    "flex_attention",
    "FlashAttention-4",
    "jvp_flash_attention",
]


class Peer(Protocol):
    """An implementation of attention."""

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of the packages whose versions are recorded."""
        ...

    def missing(self, platform: Platform) -> str | None:
        """Say in a sentence why the peer takes no part on this machine; `None`: it does."""
        ...

    def refuses(self, case: Case, names: Sequence[str]) -> str | None:
        """Say why, by its own account, it cannot do a case with arguments of these names; `None`: it may."""
        ...

    def serving(self, case: Case, data: Data) -> str | None:
        """Return which of its implementations will serve, where that can be asked."""
        ...

    def prepare(self, case: Case, work: Work, data: Data) -> Prepared:
        """Return the work, compiled and done once: the forward, both passes, or forward mode."""
        ...


def _tokamax() -> Callable[..., Any]:
    return importlib.import_module("tokamax").dot_product_attention


def _fa4_jax() -> Callable[..., Any]:
    """Return FlashAttention-4 of the package fa4-jax, with the names of `jax.nn.dot_product_attention`."""
    library = importlib.import_module("fa4_jax")

    def attention(
        query: Array,
        key: Array,
        value: Array,
        *,
        is_causal: bool = False,
        local_window_size: tuple[int, int] | None = None,
        segment_ids: Array | None = None,
        mask_mod: mask_mods.Bound | None = None,
    ) -> Array:
        if query.shape[1] != key.shape[1] and (is_causal or local_window_size is not None):
            raise ValueError("It aligns a mask with the last query and key, and jflash with the first ones.")
        if mask_mod is not None:
            mask = _fa4_mask(library)(mask_mod.args[0], mask_mod.func)
        else:
            mask = None if segment_ids is None else library.document_mask(segment_ids)
        return library.flash_attn(query, key, value, causal=is_causal, window_size=local_window_size, mask_mod=mask)

    return attention


@functools.cache
def _fa4_mask(library: Any) -> Callable[..., Any]:
    """Return the class of fa4-jax's masks by a function of captured arrays; its kernels are kept by the class."""
    see = lambda mask, *indices: mask.function(mask.captured, *indices)
    fields = [("captured", Any), ("function", Any, library.static())]
    return dataclasses.make_dataclass(
        "CapturedMask", fields, bases=(library.MaskMod,), frozen=True, namespace={"__call__": see}
    )


PEERS: dict[Name, Peer] = {
    "jflash": InJax("jflash", lambda: jflash.attention),
    "jax.nn": InJax("jax", lambda: jax.nn.dot_product_attention, "xla"),
    "cuDNN": InJax("jax", lambda: jax.nn.dot_product_attention, "cudnn", True, ("bfloat16", "float16")),
    "tokamax": InJax("tokamax", _tokamax),
    "fa4-jax": InJax("fa4-jax", _fa4_jax, needs_nvidia=True, dtypes=("bfloat16", "float16")),
    "torch": in_torch.dot_product_attention(),
    "flex_attention": in_torch.flex_attention(),
    "FlashAttention-4": in_torch.flash_attention_4(),
    "jvp_flash_attention": in_torch.jvp_flash_attention(),
}
"""The peers by the names under which they are shown. cuDNN's is its attention by way of jax.nn, and flex_attention
torch's. FlashAttention-4 is called in torch, or in JAX by way of fa4-jax."""


def asking_for(implementation: str | None) -> Mapping[Name, Peer]:
    """Return the peers, with this implementation of jflash.

    Raises:
      ValueError: if it has none of that name.
    """
    if implementation is None:
        return PEERS
    _dispatch.candidates(implementation)
    return {**PEERS, "jflash": InJax("jflash", lambda: jflash.attention, implementation)}


def versions(peers: Sequence[Name]) -> dict[str, str]:
    """Return the versions of jflash, JAX and the packages of these peers."""
    packages = dict.fromkeys(
        ["jflash", "jax", "jaxlib", *(package for name in peers for package in PEERS[name].packages)]
    )
    return {name: version(name) for name in packages}


def version(package: str) -> str:
    """Return what a record says of the version of a package that takes part."""
    return _versions.installed(package) or "from a folder on the path"
