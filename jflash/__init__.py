"""FlashAttention for JAX: exact, O(N) memory, forward and backward, one meaning on every machine."""

from __future__ import annotations

from jflash._api import attention, explain
from jflash._hints import AttentionWarning
from jflash._replacing import replacing_jax_nn

__all__ = ["AttentionWarning", "attention", "explain", "replacing_jax_nn"]

__version__: str


def __getattr__(name: str) -> str:
    """The version is looked up when asked for: a checkout on the path that was never installed has none."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jflash")
    raise AttributeError(f"module 'jflash' has no attribute {name!r}")
