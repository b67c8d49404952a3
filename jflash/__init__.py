"""FlashAttention for JAX: one function, one meaning on every machine."""

from importlib.metadata import version as _version

from jflash._api import attention, explain

__all__ = ["attention", "explain"]
__version__ = _version("jflash")
