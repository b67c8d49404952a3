"""The same kernels through jax-mps's `metal_kernel_jit`, where that is installed. Untried: no release has it yet.

jax-mps's platform `mps` has no FFI. A function that launches a kernel from source is proposed
(https://github.com/tillahoffmann/jax-mps/pull/212): it takes the body of a kernel and writes the signature itself,
after the arrays' dtypes. So a kernel's body is taken out of the source here, and begins with each argument again, under
its own name and with its own type. The tests run what comes of it in the emulator, through a stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_MODULE = "jax_plugins.mps"
_LEAST = 8
"""Arrays with fewer elements come in another address space."""


def launcher() -> Callable[..., Any] | None:
    """jax-mps's `metal_kernel_jit`, where it is installed and has it."""
    package = _MODULE.split(".")[0]
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(_MODULE) is None:
        return None
    return getattr(importlib.import_module(_MODULE), "metal_kernel_jit", None)


def launch(
    source: str,
    entry: str,
    grid: tuple[int, int, int],
    threads: tuple[int, int, int],
    parameters: bytes,
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
) -> tuple[Array, ...]:
    """What `_ffi.launch` does, on the platform mps."""
    kernel = launcher()
    assert kernel is not None
    header, arguments, body = split(source, entry)
    arrays = [argument for argument in arguments if "buffer(" in argument.attribute]
    # Number by number, as the sharding rule around this takes no program that has arrays of its own.
    words = jnp.concatenate([jnp.full(1, word, jnp.int32) for word in np.frombuffer(parameters, np.int32).tolist()])
    inputs = [_widened(array) for array in operands] + [words]
    *names, last = [argument.name for argument in arrays]
    of_results = names[len(operands) :]
    launched = kernel(
        f"jflash_{entry}",
        inputs,
        output_shapes=[result.shape for result in results],
        output_dtypes=[result.dtype for result in results],
        grid=tuple(count * size for count, size in zip(grid, threads, strict=True)),
        threadgroup=threads,
        source="\n".join([argument.again() for argument in arguments] + [body]),
        header=header,
        input_names=[f"{name}_bound" for name in [*names[: len(operands)], last]],
        output_names=[f"{name}_bound" for name in of_results],
    )
    return tuple(launched)


def _widened(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat if flat.size >= _LEAST else jnp.pad(flat, (0, _LEAST - flat.size))


class Argument:
    """One argument of a kernel: `device const float* lse [[buffer(15)]]`."""

    def __init__(self, text: str) -> None:
        found = re.fullmatch(r"(.*\W)(\w+) \[\[(.*)\]\]", text.strip())
        assert found is not None, text
        self.type, self.name, self.attribute = found[1].strip(), found[2], found[3]

    def again(self) -> str:
        """Its declaration inside the body, from what the generated signature has."""
        if self.type == "constant Parameters&":
            return f"const Parameters {self.name} = *(device const Parameters*){self.name}_bound;"
        if "buffer(" in self.attribute:
            return f"{self.type} {self.name} = ({self.type}){self.name}_bound;"
        return f"{self.type} {self.name} = {self.attribute};"


def split(source: str, entry: str) -> tuple[str, list[Argument], str]:
    """What stands before the kernels, one kernel's arguments, and its body.

    The structure of parameters is then a copy in each thread, so all that take it take it from there.
    """
    definitions = dict(re.findall(r"^#define (\w+) (\w+)$", source, re.MULTILINE))
    kernel = re.compile(r"^kernel void (\w+)\(\n(.*?)\) \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
    kernels = {found[1]: found for found in kernel.finditer(source)}
    header = kernel.sub("", source).replace("constant Parameters&", "thread const Parameters&")
    lines = _chosen(kernels[entry][2].splitlines(), definitions)
    return header, [Argument(line.rstrip().removesuffix(",")) for line in lines], kernels[entry][3]


def _chosen(lines: Sequence[str], definitions: dict[str, str]) -> list[str]:
    """The lines that `#if NAME`, `#else` and `#endif` leave."""
    kept: list[str] = []
    taken = True
    for line in lines:
        if line.startswith("#if "):
            taken = definitions[line.removeprefix("#if ")] != "0"
        elif line == "#else":
            taken = not taken
        elif line == "#endif":
            taken = True
        elif taken:
            kept.append(line)
    return kept
