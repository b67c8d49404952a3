"""FlashAttention for JAX: exact, O(N) memory, forward and backward, one meaning on every machine.

jflash.attention(query, key, value, ...)     the function, with the arguments of jax.nn.dot_product_attention and more
jflash.explain(query, key, value, ...)       which implementation would serve such a call, and why
jflash.tile_map(mask_mod, ...)               which tiles a mask function leaves, made once for many calls
jflash.ragged_paged_attention(...)           prefill and decode of many sequences that share a paged cache
jflash.update_pages(...)                     a step's keys and values into the pages of a cache, in place
jflash.replacing_jax_nn()                    a block in which calls of jax.nn.dot_product_attention are served
jflash.RESIDUAL_CHECKPOINT_NAMES             what policies of jax.checkpoint call the output and the log-sum-exp
jflash.flax, jflash.equinox, jflash.keras    the layers of these libraries
python -m jflash.doctor | jflash.bench       what runs on this machine | how fast it is
"""

from typing import Any

from jflash._api import attention, explain
from jflash._autodiff import RESIDUAL_CHECKPOINT_NAMES
from jflash._hints import AttentionWarning
from jflash._ragged_attention import ragged_paged_attention
from jflash._replacing import replacing_jax_nn
from jflash._tile_map import TileMap, tile_map
from jflash._update_pages import update_pages

__all__ = [
    "RESIDUAL_CHECKPOINT_NAMES",
    "AttentionWarning",
    "TileMap",
    "attention",
    "explain",
    "ragged_paged_attention",
    "replacing_jax_nn",
    "tile_map",
    "update_pages",
]

__version__: str


def __getattr__(name: str) -> Any:
    """Return the version or the layers of a library, looked up only when they are asked for.

    A checkout that was never installed has no version, and the libraries may not be installed.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("jflash")
    if name in ("equinox", "flax", "keras"):
        from importlib import import_module

        return import_module(f"jflash.{name}")
    raise AttributeError(f"module 'jflash' has no attribute {name!r}")
