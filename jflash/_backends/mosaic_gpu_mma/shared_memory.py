"""How much shared memory a CTA may have. Without a GPU at hand the compiler does not hold a kernel to it."""

from __future__ import annotations

from collections.abc import Mapping

KIB = 1024

SHARED_MEMORY: Mapping[str, int] = {
    **dict.fromkeys(("8.0", "8.7"), 163 * KIB),
    **dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 99 * KIB),
    **dict.fromkeys(("9.0", "10.0", "10.3"), 227 * KIB),
}
"""Bytes by compute capability (CUDA programming guide)."""
