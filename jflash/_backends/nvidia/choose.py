"""How every kernel's tiles are chosen: of those listed the fastest for which shared memory has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jflash import _tuning
from jflash._backends.nvidia import smem
from jflash._backends.nvidia.smem import Buffers
from jflash._tuning import TuningKey


def choose[T](
    kernel: str, facts: tuple[int | str, ...], candidates: Sequence[T], room: Callable[[T], Buffers], capacity: int
) -> T | None:
    """Return the tiles that were measured fastest on this device, else the first that fit; `None` if none do.

    Args:
      kernel: the backend and its kernel, as tuned tiles are stored.
      facts: all that the answer may depend on, besides the device.
      candidates: dataclasses of whole numbers and booleans, the best first.
      room: the buffers that a kernel with such tiles declares.
      capacity: the bytes of shared memory that a CTA may have.
    """
    fitting = [tiles for tiles in candidates if smem.size(room(tiles)) <= capacity]
    return _tuning.choose(TuningKey(kernel, facts), fitting) if fitting else None
