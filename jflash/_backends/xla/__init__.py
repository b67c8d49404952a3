"""Tiled attention in plain JAX: it runs wherever JAX does, and is the default where no kernel serves.

`plans` says how large tiles are, on a CPU and elsewhere. `tiling` walks over the tiles that some query can see;
`forward` runs the online softmax along the walk; `tangent` and `backward` recompute each tile from the log-sum-exp
(`recompute`) and sum what the tiles contribute (`sums`), a sum that has derivatives of every order. A small call is one
tile: then there is no loop, and no condition.
"""

from __future__ import annotations

from jflash._backends.xla.backward import backward
from jflash._backends.xla.forward import forward
from jflash._backends.xla.plans import is_cpu, plan
from jflash._backends.xla.tangent import tangent
from jflash._backends.xla.tiling import holds_rows, is_whole
from jflash._platform import Platform, lowered_for
from jflash._semantics import visits
from jflash._semantics.spec import Spec

__all__ = ["backward", "describe", "forward", "program", "tangent", "unsupported", "visits_lists"]


def unsupported(spec: Spec, platform: Platform) -> str | None:
    """Return why a call is refused, else `None`.

    The gradient of arrays inside `score_mod` alone can depend on the order of a GPU's atomic additions.
    """
    if spec.deterministic and "score_mod_arrays" in spec.operands and platform.name == "gpu":
        return (
            "deterministic=True with a score_mod that closes over arrays: on a GPU, XLA may sum the gradient "
            "of indexed arrays in any order."
        )
    return None


def visits_lists(spec: Spec, platform: Platform) -> bool:
    """Whether blocks have lists of the tiles that they visit, so that a map of them is of use."""
    with lowered_for(platform):
        shapes = plan(spec, "forward"), plan(spec, "backward")
    return any(shape.listed and not is_whole(spec, shape) for shape in shapes)


def program(platform: Platform) -> str:
    """Return the name of the program for a platform: CPUs and all other platforms have different tiles (`plans`)."""
    return "cpu" if is_cpu(platform) else "gpu"


def describe(spec: Spec, platform: Platform) -> str:
    """Return the tiles of both passes, and what is held of them, as text."""
    with lowered_for(platform):
        shapes = {"forward": plan(spec, "forward")}
        if spec.pages is None:
            shapes["backward"] = plan(spec, "backward")
    lines: list[str] = []
    for work, shape in shapes.items():
        heads = shape.key_heads * spec.group
        size = shape.batch * heads * shape.queries * shape.keys * spec.accumulator.itemsize
        logits = f"{size / 2**20:.2g} MiB of {spec.accumulator} logits"
        if is_whole(spec, shape):
            lines.append(f"{work}: one tile, without a loop: {logits}")
            continue
        lines.append(
            f"{work}: tiles of {shape.queries} queries by {shape.keys} keys, {shape.batch} of {spec.batch} batch "
            f"entries and {heads} of {spec.heads} heads at a time: {logits}"
        )
    if "backward" in shapes:
        shape = shapes["backward"]
        if is_whole(spec, shape):
            lines[-1] += ", the forward's if compiled with it"
        else:
            lines[-1] += ", computed again" + ("" if holds_rows(spec, shape) else " from the log-sum-exp")
    of_pairs = "a byte for each tile of 128 x 128, no more that grows" if visits.has_map(spec) else "none that grows"
    return "\n".join([*lines, f"memory: a few tiles, and arrays that grow with T + S; {of_pairs} with T * S"])
