"""What a warpgroup does where there is no `wgmma`: products and copies by the instructions that Ampere brought."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from jflash._backends.mosaic_gpu_mma import copies, device_sums, paged_copies, products, warp_sums
from jflash._backends.nvidia.ops import Ops
from jflash._backends.nvidia.threads import coordinates


class MmaOps(Ops):
    """The operations of the warpgroups of a CTA, which copy for themselves and compute."""

    def indices(self, shape: tuple[int, ...], axis: int, first: Any) -> Int[Array, "64 columns"]:
        return coordinates.indices(shape, axis, first)

    add_product = staticmethod(products.add_product)
    load_rows = staticmethod(products.load_rows)
    sum_of_warps = staticmethod(warp_sums.sum_of_warps)
    scaled_pair = staticmethod(products.scaled_pair)

    copy_rows = staticmethod(copies.copy_rows)
    copy_cached_rows = staticmethod(paged_copies.copy_cached_rows)
    copy_page_numbers = staticmethod(paged_copies.copy_page_numbers)
    load_page_scales = staticmethod(paged_copies.load_page_scales)
    copy_numbers = staticmethod(copies.copy_numbers)
    commit = staticmethod(copies.commit)
    wait = staticmethod(copies.wait)
    store_tile = staticmethod(copies.store_tile)
    store_pair = staticmethod(copies.store_pair)

    add_rows = staticmethod(device_sums.add_rows)
    load_sums = staticmethod(device_sums.load_rows)


MMA = MmaOps()
