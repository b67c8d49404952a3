"""Attention in torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array

from jflash._platform import Platform
from jflash.bench import clocks
from jflash.bench.cases import DIFFERENTIATED, Case, Data, Work, options
from jflash.bench.record import Figures


class InTorch:
    """`torch.nn.functional.scaled_dot_product_attention`; on an NVIDIA GPU by CUDA events, else by the wall clock."""

    package = "torch"
    ARGUMENTS: ClassVar[dict[str, str]] = {"is_causal": "is_causal", "bias": "attn_mask", "mask": "attn_mask"}
    """What it calls those options that it has."""

    def missing(self, platform: Platform) -> str | None:
        """If it is not installed, or does not see JAX's device."""
        if importlib.util.find_spec(self.package) is None:
            return "torch is not installed."
        if platform.name == "cpu" or (clocks.on_nvidia() and self._torch.cuda.is_available()):
            return None
        return f"This torch has no device for {platform}."

    def refuses(self, case: Case, names: Sequence[str]) -> str | None:
        """An option that it does not have."""
        unknown = [name for name in names if name not in (*self.ARGUMENTS, "query", "key", "value")]
        return f"It has no argument {', '.join(unknown)}." if unknown else None

    def serving(self, case: Case, data: Data) -> str | None:
        """It does not say."""
        return None

    def prepare(self, case: Case, work: Work, data: Data) -> clocks.Prepared:
        """In its own layout, [batch, heads, tokens, head dimension]."""
        torch = self._torch
        torch.set_num_threads(os.cpu_count() or 1)
        tensors = {
            name: self._tensor(array if name in self.ARGUMENTS else array.swapaxes(1, 2))
            for name, array in data.arguments.items()
        }
        cotangent = self._tensor(data.cotangent.swapaxes(1, 2))
        given = {self.ARGUMENTS.get(name, name): value for name, value in {**tensors, **options(case)}.items()}
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **given)
        if case.heads != case.key_heads:
            attend = functools.partial(attend, enable_gqa=True)
        arguments = sum(tensor.nbytes for tensor in tensors.values())
        if work == "fwd":
            return self._prepared(attend, arguments)
        variable = [tensor.requires_grad_() for name, tensor in tensors.items() if name in DIFFERENTIATED]

        def both() -> object:
            out = attend()
            return out, torch.autograd.grad(out, variable, cotangent)

        return self._prepared(both, arguments + cotangent.nbytes)

    @property
    def _torch(self) -> Any:
        return importlib.import_module("torch")

    def _tensor(self, array: Array) -> Any:
        # NumPy's bfloat16 is none of torch's.
        plain = np.array(array, None if array.dtype == bool else np.float32)
        tensor = self._torch.from_numpy(plain).to("cuda" if clocks.on_nvidia() else "cpu")
        return tensor if array.dtype == bool else tensor.to(getattr(self._torch, str(array.dtype)))

    def _prepared(self, call: Callable[[], Any], arguments: int) -> clocks.Prepared:
        """`arguments` is how many bytes they have."""
        if not clocks.on_nvidia():
            call()
            return clocks.Prepared(clocks.wall_clock(call), Figures())
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        results = call()
        cuda.synchronize()
        kept, most = cuda.memory_allocated() - before, cuda.max_memory_allocated() - before
        del results

        def sample() -> Sequence[float]:
            times: list[float] = []
            for _ in range(clocks.ITERATIONS):
                start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop))
            return times

        memory = Figures(temporary_mib=(most - kept) / clocks.MIB, peak_mib=(most + arguments) / clocks.MIB)
        return clocks.Prepared(sample, memory)
