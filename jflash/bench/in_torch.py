"""The attention of torch: its own function, and others that take its tensors."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Array

from jflash._platform import Platform
from jflash.bench import clocks, mask_mods, packages, score_mods
from jflash.bench.cases import DIFFERENTIATED, Case, Data, Work, options
from jflash.bench.record import Figures

QUEUEING_CYCLES = 20_000_000
"""The cycles for which the GPU is kept waiting while a sample's calls are queued: ten milliseconds at 2 GHz."""


@dataclasses.dataclass(frozen=True)
class InTorch:
    """A function of torch tensors; on an NVIDIA GPU timed by CUDA events, else by the wall clock."""

    package: str
    """The package's name where it is published."""
    module: str
    """The package's name in Python."""
    load: Callable[[], Callable[..., Any]]
    """A function that imports and returns the library's attention, which returns the output alone.

    It is called only if the package is here.
    """
    arguments: Mapping[str, str | None]
    """The library's names for the arguments of `jflash.attention` that it has; `None`: it needs none."""
    heads_first: bool = False
    """Whether the library's layout is [batch, heads, tokens, head dimension] instead of jax.nn's."""
    for_grouped_heads: Mapping[str, Any] | None = dataclasses.field(default_factory=dict[str, Any])
    """The arguments that tell the library of fewer key heads than query heads; `None`: it takes no such call."""
    compiler: tuple[str, ...] = ()
    """The package that compiles the library's kernels when they are called, whose version matters as much as the
    library's own."""
    needs_nvidia: bool = False
    has_forward_mode: bool = False
    """Whether the library's kernels make tangents. If so, it takes tensors of its own layout without a copy, and no
    other's."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of the packages whose versions are recorded: the library, its compiler and torch."""
        return self.package, *self.compiler, "torch"

    def missing(self, platform: Platform) -> str | None:
        """Say why the library is not here: not installed, not importable, or blind to JAX's device; `None`: it is."""
        for package, module in (("torch", "torch"), (self.package, self.module)):
            reason = packages.missing(package, module)
            if reason is not None:
                return reason
        if self.needs_nvidia and not clocks.on_nvidia():
            return f"It needs an NVIDIA GPU, and this is {platform}."
        reason = packages.unimportable(self.package, self.load)
        if reason is not None:
            return reason
        if platform.name == "cpu" or (clocks.on_nvidia() and _torch().cuda.is_available()):
            return None
        return f"This torch has no device for {platform}."

    def refuses(self, case: Case, names: Sequence[str]) -> str | None:
        """Say which dtype or argument of a case the library does not have; `None`: it has all."""
        if case.dtype not in self.dtypes:
            return f"It takes {' and '.join(self.dtypes)}, not {case.dtype}."
        if case.heads != case.key_heads and self.for_grouped_heads is None:
            return "It wants as many key heads as query heads."
        unknown = [name for name in names if name not in self.arguments]
        if case.score_mod is not None and self._form(case.score_mod) is None:
            unknown.append("score_mod")
        if case.mask_mod is not None and "mask_mod" not in self.arguments:
            unknown.append("mask_mod")
        return f"It has no argument {', '.join(unknown)}." if unknown else None

    def _form(self, name: score_mods.Name) -> score_mods.Form | None:
        """Return how the library is asked for a `score_mod`, which is never a bias.

        torch would make a bias in one pass over memory for each operation.
        """
        forms: tuple[score_mods.Form, ...] = ("score_mod", score_mods.SCORE_MODS[name].stand_in)
        return next((form for form in forms if form != "bias" and form in self.arguments), None)

    def serving(self, case: Case, data: Data) -> str | None:
        """Return `None`: torch does not say which implementation serves."""
        return None

    def prepare(self, case: Case, work: Work, data: Data) -> clocks.Prepared:
        """Return the work, called once with JAX's own arrays as tensors.

        Raises:
          NotImplementedError: for forward mode, if the library has none.
        """
        if work == "jvp" and not self.has_forward_mode:
            raise NotImplementedError("It has no kernels for forward mode.")
        torch = _torch()
        torch.set_num_threads(os.cpu_count() or 1)
        tensors = {name: self._tensor(name, array) for name, array in data.arguments.items() if self.arguments[name]}
        captured = {name: self._tensor(name, array) for name, array in data.captured.items()}
        cotangent = self._tensor("cotangent", data.cotangent)
        asked = {**tensors, **options(case)}
        if case.score_mod is not None and (form := self._form(case.score_mod)) is not None:
            capped = form == "logits_soft_cap"
            asked[form] = score_mods.CAP if capped else score_mods.bound(case.score_mod, torch, captured)
        if case.mask_mod is not None:
            asked["mask_mod"] = mask_mods.bound(case.mask_mod, captured)
        given = {own: value for name, value in asked.items() if (own := self.arguments[name])}
        if case.heads != case.key_heads and self.for_grouped_heads is not None:
            given |= self.for_grouped_heads
        attend = functools.partial(self.load(), **given)
        tensors |= captured
        arguments = sum(tensor.nbytes for tensor in tensors.values())
        if work == "fwd":
            return _prepared(attend, arguments)
        if work == "jvp":
            forward_mode: Any = importlib.import_module("torch.autograd.forward_ad")
            moving = {
                own: tensors[name]
                for name, own in self.arguments.items()
                if own and name in tensors and name in DIFFERENTIATED
            }

            def push() -> object:
                with forward_mode.dual_level():
                    # The direction is that of the tensors themselves, as in JAX.
                    duals = {own: forward_mode.make_dual(tensor, tensor) for own, tensor in moving.items()}
                    return forward_mode.unpack_dual(attend(**duals))

            return _prepared(push, arguments)
        variable = [tensor.requires_grad_() for name, tensor in tensors.items() if name in DIFFERENTIATED]

        def both() -> object:
            out = attend()
            return out, torch.autograd.grad(out, variable, cotangent)

        return _prepared(both, arguments + cotangent.nbytes)

    def _tensor(self, name: str, array: Array) -> Any:
        by_token = name in ("query", "key", "value", "cotangent")
        tensor = _torch().from_dlpack(array.swapaxes(1, 2) if self.heads_first and by_token else array)
        return tensor.contiguous() if self.has_forward_mode else tensor


def dot_product_attention() -> InTorch:
    """Import `torch.nn.functional.scaled_dot_product_attention`."""
    return InTorch(
        package="torch",
        module="torch",
        load=lambda: _torch().nn.functional.scaled_dot_product_attention,
        arguments=dict(
            query="query",
            key="key",
            value="value",
            is_causal="is_causal",
            bias="attn_mask",
            mask="attn_mask",
            dropout_rate="dropout_p",
            dropout_key=None,
        ),
        heads_first=True,
        for_grouped_heads={"enable_gqa": True},
    )


def flex_attention() -> InTorch:
    """Import `torch.nn.attention.flex_attention`, compiled. On a CPU it has no backward.

    Source: https://docs.pytorch.org/docs/2.15/nn.attention.flex_attention.html.
    """

    def load() -> Callable[..., Any]:
        module = importlib.import_module("torch.nn.attention.flex_attention")

        # Each case has a function of its own: torch compiles one function for a few cases only.
        def attention(*arrays: Any, **options: Any) -> Any:
            return module.flex_attention(*arrays, **options)

        attention.__code__ = attention.__code__.replace()
        compiled = _torch().compile(attention, fullgraph=True, dynamic=False)
        before = mask_mods.bound("causal", {})

        # A mask of blocks is made once, as torch's documentation has it, and is not timed.
        @functools.cache
        def blocks(mask_mod: mask_mods.Bound, batch: int | None, queries: int, keys: int, device: Any) -> Any:
            return module.create_block_mask(mask_mod, batch, None, queries, keys, device=device)

        def attend(
            query: Any, key: Any, value: Any, *, is_causal: bool = False, mask_mod: Any = None, **options: Any
        ) -> Any:
            mask, lengths = None, (query.shape[2], key.shape[2], query.device)
            if mask_mod is not None:
                mask = blocks(mask_mod, query.shape[0], *lengths)
            elif is_causal:
                mask = blocks(before, None, *lengths)
            return compiled(query, key, value, block_mask=mask, **options)

        return attend

    return InTorch(
        package="torch",
        module="torch.nn.attention.flex_attention",
        load=load,
        arguments={name: name for name in ("query", "key", "value", "is_causal", "score_mod", "mask_mod")},
        heads_first=True,
        for_grouped_heads={"enable_gqa": True},
        needs_nvidia=True,
    )


def flash_attention_4() -> InTorch:
    """Import FlashAttention-4, which is written in CuTe's Python and compiles its kernels when they are first called.

    Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py.
    """

    def load() -> Callable[..., Any]:
        function = importlib.import_module("flash_attn.cute").flash_attn_func
        # The function returns the log-sum-exp too.
        return lambda **arguments: function(**arguments)[0]

    return InTorch(
        package="flash-attn-4",
        module="flash_attn.cute",
        load=load,
        arguments=dict(
            query="q",
            key="k",
            value="v",
            is_causal="causal",
            local_window_size="window_size",
            logits_soft_cap="softcap",
            sinks="learnable_sink",
        ),
        compiler=("nvidia-cutlass-dsl",),
        needs_nvidia=True,
        dtypes=("bfloat16", "float16"),
    )


def jvp_flash_attention() -> InTorch:
    """Import kernels in Triton that make the output and its tangent together.

    Source: https://github.com/amorehead/jvp-flash-attention, JVPAttn.fwd_dual.
    """

    return InTorch(
        package="jvp_flash_attention",
        module="jvp_flash_attention.jvp_attention",
        load=lambda: importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn.fwd_dual,
        arguments=dict(query="q", key="k", value="v", is_causal="causal"),
        heads_first=True,
        for_grouped_heads=None,
        compiler=("triton",),
        needs_nvidia=True,
        has_forward_mode=True,
    )


def _torch() -> Any:
    return importlib.import_module("torch")


def _prepared(call: Callable[[], Any], arguments: int) -> clocks.Prepared:
    """Return the work, called once; `arguments` is the number of bytes of its arguments."""
    if not clocks.on_nvidia():
        call()
        return clocks.Prepared(clocks.wall_clock(call), Figures())
    cuda = _torch().cuda
    # The first call may compile, and a compiler allocates what it likes.
    call()
    cuda.synchronize()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    results = call()
    cuda.synchronize()
    kept, most = cuda.memory_allocated() - before, cuda.max_memory_allocated() - before
    del results

    def sample() -> Sequence[float]:
        runs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(clocks.ITERATIONS)]
        # All calls are queued before the first one begins. A GPU that waited for Python would have its waiting timed.
        cuda._sleep(QUEUEING_CYCLES)
        for _ in range(clocks.WARM_UP):
            call()
        for start, stop in runs:
            start.record()
            call()
            stop.record()
        cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in runs]

    memory = Figures(temporary_mib=(most - kept) / clocks.MIB, peak_mib=(most + arguments) / clocks.MIB)
    return clocks.Prepared(sample, memory)
