"""Compiles the Hopper kernels for sm_90a on a machine without a GPU, and prints what ptxas says of each, as JSON.

    python hopper_compile.py DIRECTORY

A program of its own: where Mosaic GPU leaves its reports is read from the environment before JAX is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import unittest.mock
from pathlib import Path

os.environ["MOSAIC_GPU_DUMP_TO"] = sys.argv[1]
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import kernel_families
from h200 import over
from hopper_kernels import canonical_arguments
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jflash import _sharding, _tuning
from jflash._backends.mosaic_gpu import plan, run, tangent_kernel
from jflash._backends.mosaic_gpu.ops import HOPPER
from jflash._backends.nvidia.walk.work_items import Splits
from jflash._semantics.spec import Operands, Residuals, Results, Spec

DIRECTORY = Path(sys.argv[1])
bfloat16, float32 = jnp.bfloat16, jnp.float32
LENGTH = 1024
PAIRS = (1, 4, LENGTH, LENGTH)
DROPOUT_KEY = dict(dropout_key=((2,), jnp.uint32))


def all_operations(batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """A mask_mod of every operation that the kernels say they take."""
    distance = (query - key).astype(jnp.float32)
    waves = jnp.sin(distance) + jnp.cos(-distance) * jnp.tanh(distance) - jnp.sqrt(jnp.abs(distance))
    powers = (
        jnp.exp(distance) + jnp.exp2(distance) + jnp.log(distance) + lax.rsqrt(distance) + distance**3 + distance**2
    )
    bits = (query >> 3) ^ (key << 1) | lax.shift_right_logical(query, 2) & ~key
    whole = query // 96 - key % 7 + jnp.sign(query - key) * lax.clamp(0, key, 5) + lax.square(key)
    ordered = (query >= key) & (key < 99) | (whole != 3) & ~(bits <= jnp.minimum(query, 7))
    return jnp.where(head % 2 == 1, ordered, (waves > jnp.maximum(powers, 0.5)) ^ (batch == 0))


def neighbors(batch: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """A mask_mod that makes two numbers of each index: pixels near each other, in rows of 64."""
    return (jnp.abs(query // 64 - key // 64) <= 7) & (jnp.abs(query % 64 - key % 64) <= 7)


CASES = {
    **{f"d{d}": (d, d, {}, {}) for d in (8, 40, 64, 80, 96, 128, 256)},
    **{f"d{d} causal": (d, d, dict(is_causal=True), {}) for d in (64, 72, 80, 96, 112, 128, 256)},
    "d64 causal, soft cap": (64, 64, dict(is_causal=True, logits_soft_cap=50.0), {}),
    "d64 causal, bias of keys": (64, 64, dict(is_causal=True), dict(bias=((1, 4, 1, LENGTH), bfloat16))),
    "d64 causal, alibi": (64, 64, dict(is_causal=True), dict(alibi_slopes=((4,), float32))),
    "d64 causal, segments": (64, 64, dict(is_causal=True), dict(segment_ids=((2, LENGTH), jnp.int32))),
    **{f"d{d} deterministic": (d, d, dict(deterministic=True), {}) for d in (64, 128)},
    **{f"d{d} causal, in order": (d, d, dict(is_causal=True, deterministic=True), {}) for d in (64, 80, 96, 128)},
    **{f"d{d}, in order": (d, d, dict(deterministic=True), {}) for d in (64, 128)},
    "lengths, in order": (
        128,
        128,
        dict(deterministic=True),
        dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), ((2,), jnp.int32)),
    ),
    "d192/128 causal": (192, 128, dict(is_causal=True), {}),
    "window": (128, 128, dict(is_causal=True, local_window_size=(1023, 0)), {}),
    "soft cap": (128, 128, dict(logits_soft_cap=50.0), {}),
    "soft cap and scale": (128, 128, dict(logits_soft_cap=50.0, deterministic=True), dict(scale=((), float32))),
    "bias": (128, 128, {}, dict(bias=(PAIRS, bfloat16))),
    "bias float32": (128, 128, {}, dict(bias=(PAIRS, float32))),
    "bias of keys": (128, 128, {}, dict(bias=((1, 4, 1, LENGTH), bfloat16))),
    "mask": (128, 128, {}, dict(mask=(PAIRS, jnp.bool_))),
    "mask of heads": (128, 128, {}, dict(mask=((1, 4, 1, 1), jnp.bool_))),
    "mask of keys": (128, 128, {}, dict(mask=((1, 4, 1, LENGTH), jnp.bool_))),
    **{f"d{d} mask_mod": (d, d, {}, dict(documents=((2, LENGTH), jnp.int32))) for d in (64, 128, 512)},
    "mask_mod of all operations": (64, 64, dict(mask_mod=all_operations), {}),
    "d128 mask_mod of pixels": (128, 128, dict(mask_mod=neighbors), {}),
    "lengths": (128, 128, {}, dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), ((2,), jnp.int32))),
    "score_mod of a bias of keys": (
        64,
        64,
        dict(
            deterministic=True,
            score_mod=lambda logit, batch, *_: logit * (1 + 0.25 * (batch & 1)),
        ),
        dict(bias=((1, 4, 1, LENGTH), bfloat16)),
    ),
    "score_mod of some heads": (
        64,
        64,
        dict(score_mod=lambda logit, batch, head, *_: jnp.where(head > 1, 2 * logit, logit)),
        {},
    ),
    "score_mod of a number for each head": (
        128,
        128,
        {},
        dict(numbers=((4,), float32)),
    ),
    **{
        f"d{d} causal, score_mod of a table": (d, d, dict(is_causal=True), dict(numbers=((4, 256), float32)))
        for d in (64, 128, 256)
    },
    "bias, score_mod of a table": (128, 128, {}, dict(bias=(PAIRS, bfloat16), numbers=((4, 256), float32))),
    "alibi and scale": (128, 128, {}, dict(alibi_slopes=((4,), float32), scale=((), float32))),
    **{f"d{d} causal, dropout": (d, d, dict(is_causal=True, dropout_rate=0.1), DROPOUT_KEY) for d in (64, 128, 256)},
    "dropout deterministic": (128, 128, dict(dropout_rate=0.1, deterministic=True), DROPOUT_KEY),
    "bias, dropout": (128, 128, dict(dropout_rate=0.1), dict(bias=(PAIRS, bfloat16), **DROPOUT_KEY)),
    "soft cap, dropout": (128, 128, dict(dropout_rate=0.1, logits_soft_cap=50.0), DROPOUT_KEY),
    **{
        f"d{d} causal, partial": (d, d, dict(is_causal=True), dict(query_offset=((), jnp.int32)))
        for d in (64, 128, 256)
    },
    "bias, partial": (128, 128, {}, dict(bias=(PAIRS, bfloat16))),
    "d512": (512, 512, {}, {}),
    "d512 causal": (512, 512, dict(is_causal=True), {}),
    "d512 causal, partial": (512, 512, dict(is_causal=True), dict(query_offset=((), jnp.int32))),
    "d576/512": (576, 512, {}, {}),
    "d576/512 causal, soft cap": (576, 512, dict(is_causal=True, logits_soft_cap=50.0), {}),
    "d576 causal": (576, 576, dict(is_causal=True), {}),
    "d320 causal, dropout": (320, 320, dict(is_causal=True, dropout_rate=0.1), DROPOUT_KEY),
    "d512, bias": (512, 512, {}, dict(bias=(PAIRS, bfloat16))),
    "d512, score_mod of a table": (512, 512, {}, dict(numbers=((4, 256), float32))),
    "d512, mask": (512, 512, {}, dict(mask=(PAIRS, jnp.bool_))),
    "d576/512, alibi and scale": (576, 512, {}, dict(alibi_slopes=((4,), float32), scale=((), float32))),
    "d64/512, bias of keys": (64, 512, {}, dict(bias=((1, 4, 1, LENGTH), bfloat16))),
    "d272/64": (272, 64, {}, {}),
    **{f"float32 d{d}": (d, d, {}, {}) for d in (64, 128)},
    **{f"float32 d{d} causal": (d, d, dict(is_causal=True), {}) for d in (64, 128)},
    **{f"float32 d{d}, highest": (d, d, dict(precision="highest"), {}) for d in (64, 128)},
    "float32 d128 deterministic": (128, 128, dict(deterministic=True), {}),
    "float32 d64 as bfloat16": (64, 64, dict(precision="BF16_BF16_F32"), {}),
    "float32, soft cap": (64, 64, dict(logits_soft_cap=50.0), {}),
    "float32, bias": (128, 128, {}, dict(bias=(PAIRS, float32))),
    "float32, bias of keys": (64, 64, {}, dict(bias=((1, 4, 1, LENGTH), float32))),
    "float32, dropout": (64, 64, dict(dropout_rate=0.1), DROPOUT_KEY),
    "float32 d256": (256, 256, {}, {}),
    "float32 d256 causal": (256, 256, dict(is_causal=True), {}),
    "float32 d256 causal, partial": (256, 256, dict(is_causal=True), dict(query_offset=((), jnp.int32))),
    "float32 d192, highest": (192, 192, dict(precision="highest"), {}),
    "float32 d256/128 causal, highest": (256, 128, dict(is_causal=True, precision="highest"), {}),
    "float32 d256 causal, soft cap": (256, 256, dict(is_causal=True, logits_soft_cap=50.0), {}),
    "float32 d256, bias": (256, 256, {}, dict(bias=(PAIRS, float32))),
    "float32 d256, mask": (256, 256, {}, dict(mask=(PAIRS, jnp.bool_))),
    "float32 d256, alibi and scale": (256, 256, {}, dict(alibi_slopes=((4,), float32), scale=((), float32))),
    "float32 d256 causal, dropout": (256, 256, dict(is_causal=True, dropout_rate=0.1), DROPOUT_KEY),
    "float32 d256 causal, score_mod of a table": (256, 256, dict(is_causal=True), dict(numbers=((4, 256), float32))),
    "float32 d64/512": (64, 512, {}, {}),
    "float32 partial": (128, 128, dict(is_causal=True), dict(query_offset=((), jnp.int32))),
}
PARTIAL = tuple(name for name in CASES if name.endswith("partial"))
"""Cases that are a part of a call."""
TWO_KERNELS = tuple(name for name, case in CASES.items() if case[2].get("deterministic") and "in order" not in name)
"""Cases whose dQ is not made with dK and dV, as if it had no order."""
FLOAT32 = tuple(name for name in CASES if name.startswith("float32"))
"""Cases whose operands are float32."""

ROUNDS = (
    *("d64", "d64 causal", "d64 causal, soft cap", "d64 causal, bias of keys", "d64 causal, segments"),
    *("d128", "d128 causal", "d192/128 causal", "d256", "d256 causal", "window", "bias", "bias of keys"),
    *("d128 causal, partial", "float32 d64", "float32 d128", "float32 d128 causal"),
    *("d512 causal", "d576/512 causal, soft cap", "d320 causal, dropout", "float32 d256 causal"),
)
"""Cases that are compiled for one processor too, where a block of the grid takes several blocks."""
SHORT = {
    **{"d40": 512, "d64": 512, "d64 causal": 256, "d64 causal, soft cap": 384},
    **{"d96 causal": 256, "d128 causal": 64, "window": 64},
}
"""Cases that are compiled for 512 tokens too, where the last CTA rounds dQ, and for so many whose dQ stays in shared
memory."""
ODD = {
    **{"d64": 1021, "d64 causal": 197, "d128 causal": 1021, "d80 causal": 261, "d96 causal": 1021},
    **{"d112 causal": 1021, "d256": 1021, "soft cap": 1021},
}
"""Cases that are also compiled for this many tokens, a number that 8 does not divide."""
SHARED = ("d128 causal",)
"""Cases that are compiled for 132 processors too, where CTAs share the queries of a block of keys, and the keys of a
block of queries."""
WITHOUT_SHARES = 64
"""As many processors as the backward has blocks of 128 keys in a case."""
SPLIT = ("d64", "soft cap")
"""Cases that are compiled for two devices too."""
TABLED = (
    *("d8", "d64", "d64 causal, bias of keys", "d64 deterministic", "d128", "d128 deterministic", "d256", "bias"),
    *("d80 causal", "d96 causal", "d112 causal", "d272/64"),
)
"""Cases that are compiled with all tiles that a search on some device might choose."""
PAGED = {
    **{
        f"latent, pages of {size}": ((32, 1), dict(head_dim=576, value_dim=512, heads=(16, 1), page_size=size), {})
        for size in (16, 64)
    },
    **{
        f"latent, one array, pages of {size}": (
            (32, 1),
            dict(head_dim=576, heads=(16, 1), page_size=size, one=True),
            {},
        )
        for size in (16, 64)
    },
    "latent, one array, several": (
        (32, 4),
        dict(head_dim=512, heads=(128, 1), page_size=64, one=True),
        dict(is_causal=True),
    ),
    "decoding": ((64, 1), dict(head_dim=128, page_size=16), {}),
    "decoding d64, pages of 128": ((64, 1), dict(head_dim=64, page_size=128, interleaved=True), {}),
    "decoding in pieces, pages of 128": ((2, 4), dict(head_dim=128, page_size=128), dict(is_causal=True)),
    "decoding, float8, scales": (
        (64, 1),
        dict(head_dim=128, page_size=16, dtype=jnp.float8_e4m3fn, scales=()),
        {},
    ),
    "decoding, int8, scales of pages": (
        (64, 1),
        dict(head_dim=128, page_size=16, dtype=jnp.int8, scales=(256 * 64, 8)),
        {},
    ),
    "prefill, int8, scales": (
        (4, 512),
        dict(head_dim=128, page_size=16, dtype=jnp.int8, scales=()),
        dict(is_causal=True),
    ),
    "prefill": ((4, 512), dict(head_dim=128, page_size=16), dict(is_causal=True)),
    "prefill d64, pages of 128": ((4, 512), dict(head_dim=64, page_size=128), dict(is_causal=True)),
}
"""Calls with a paged cache of 4,096 keys for each entry: the batch and its queries, the cache, and the options."""


def main() -> None:
    """Forward, tangent and backward of every case."""
    sharding = over(1, PartitionSpec())
    reports = {f"{name}, paged: forward": paged(*case, sharding) for name, case in PAGED.items()}
    for name in SPLIT:
        for split in (PartitionSpec("x"), PartitionSpec(None, None, "x")):
            kernels, _ = compiled(name, over(2, split), {})
            reports |= {f"{name}, {split}: {kernel}": report for kernel, report in kernels.items()}
    for name in CASES:
        kernels, asked = compiled(name, sharding, {})
        reports |= {f"{name}: {kernel}": report for kernel, report in kernels.items()}
        if name in ROUNDS:
            kernels, _ = compiled(name, sharding, {}, processors=1)
            reports |= {f"{name}, rounds: {kernel}": report for kernel, report in kernels.items()}
        if name in SHORT:
            kernels, _ = compiled(name, sharding, {}, length=512)
            reports |= {f"{name}, short: {kernel}": report for kernel, report in kernels.items()}
            kernels, _ = compiled(name, sharding, {}, processors=1, length=SHORT[name])
            reports |= {f"{name}, a CTA for a head: {kernel}": report for kernel, report in kernels.items()}
        if name in SHARED:
            kernels, _ = compiled(name, sharding, {}, shares=True)
            reports |= {f"{name}, shared: {kernel}": report for kernel, report in kernels.items()}
        if name in ODD:
            kernels, _ = compiled(name, sharding, {}, length=ODD[name])
            reports |= {f"{name}, odd: {kernel}": report for kernel, report in kernels.items()}
        for place in range(1, max(map(len, asked.values())) if name in TABLED else 1):
            answers = {question: tiles[min(place, len(tiles) - 1)] for question, tiles in asked.items()}
            kernels, _ = compiled(name, sharding, answers)
            reports |= {f"{name}, tiles {place}: {kernel}": report for kernel, report in kernels.items()}
    print(json.dumps(reports))


def with_functions(
    numbers: jax.Array | None = None, documents: jax.Array | None = None, **arrays: jax.Array
) -> dict[str, object]:
    """With a score_mod that reads numbers, one for each head or for each distance, and a mask_mod of causal documents
    of each batch entry, if there are such arrays."""
    if documents is not None:
        mask_mod = lambda batch, _, query, key: (documents[batch, query] == documents[batch, key]) & (key <= query)
        return dict(arrays, mask_mod=mask_mod)
    if numbers is None:
        return arrays
    distance = lambda query, key: jnp.clip(query - key + 128, 0, 255)
    read = lambda head, *at: numbers[head] if numbers.ndim == 1 else numbers[head, distance(*at)]
    return dict(arrays, score_mod=lambda logit, batch, head, *at: logit + read(head, *at))


def compiled(
    name: str,
    sharding: NamedSharding,
    answers: dict,
    processors: int = 132,
    length: int = LENGTH,
    *,
    shares: bool = False,
) -> tuple[dict, dict]:
    """What ptxas says of each kernel of a case, with these tiles; and which others there are. Blocks stay whole, as
    those of calls that fill a device, unless CTAs share them."""
    head_dim, value_dim, options, arrays = CASES[name]
    operands = float32 if name in FLOAT32 else bfloat16
    array = lambda shape, dtype=operands: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def all_three(query, key, value, d_out, d_lse, arrays):
        arrays = with_functions(**arrays)
        spec, operands = canonical_arguments(query=query, key=key, value=value, **options, **arrays)
        spec = dataclasses.replace(spec, partial=name in PARTIAL)

        def forward(operands):
            with unittest.mock.patch.object(Splits, "of", Splits.of if shares else whole_walks):
                found = plan.plan_forward(spec.resized(operands), processors)
            return Results(*run.forward(found, operands, HOPPER))

        def tangent(operands, results):
            moving = tangent_kernel.MOVING & spec.operands
            tangents = Operands(
                **{name: array if name in moving else None for name, array in operands._asdict().items()}
            )
            found = plan.plan_tangent(spec.resized(operands), moving, processors)
            return run.tangent(found, operands, results, tangents, HOPPER)

        def backward(operands, residuals):
            family = kernel_families.TWO_KERNELS if name in TWO_KERNELS else kernel_families.HOPPER
            _, found = family.plans(spec.resized(operands), processors if shares else min(processors, WITHOUT_SHARES))
            return run.backward(found, operands, residuals, HOPPER)

        def over_devices(function, *args):
            return _sharding.shard(lambda _, *args: function(*args), spec, jax.eval_shape(function, *args))(*args)

        out, lse = over_devices(forward, operands)
        residuals = Residuals(out.astype(spec.dtype), lse, d_out, d_lse)
        has_tangent = tangent_kernel.fits(spec)
        t_out = over_devices(tangent, operands, Results(out, lse)) if has_tangent else ()
        return out, t_out, over_devices(backward, operands, residuals)

    clear()
    with _tuning.trying(answers) as trial:
        jax.jit(all_three).lower(
            *(array((2, length, 4, dim)) for dim in (head_dim, head_dim, value_dim, value_dim)),
            array((2, 4, length), float32),
            {argument: array(*type_) for argument, type_ in arrays.items()},
        ).compile()
    return reported(), trial.asked


def whole_walks(spec: Spec, heads: int, blocks: int, *_: object) -> Splits:
    """Return what `Splits.of` returns where no multiprocessor is idle."""
    return Splits(spec.batch, blocks)


def paged(rows: tuple[int, int], cache: dict, options: dict, sharding: NamedSharding, length: int = 4 * LENGTH) -> dict:
    """What ptxas says of the forward of a call with a paged cache, of as many keys for each entry."""
    (batch, queries), (head_dim, page_size) = rows, (cache["head_dim"], cache["page_size"])
    array = lambda *shape, dtype=bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    (heads, key_heads), interleaved = cache.get("heads", (32, 8)), cache.get("interleaved", False)
    number, cached = batch * length // page_size, cache.get("dtype", bfloat16)
    of_heads = lambda dim: array(number, page_size, key_heads * (1 + interleaved), dim, dtype=cached)
    is_one = interleaved or "one" in cache
    pages = [of_heads(dim) for dim in (head_dim, cache.get("value_dim", head_dim))][: 2 - is_one]

    def forward(query, pages, table, lengths, scales):
        key, value = (pages[0], None if interleaved else pages[0]) if is_one else pages
        more = scales | (dict(query_offset=lengths - queries) if options else {})
        spec, operands = canonical_arguments(
            query=query, key=key, value=value, page_table=table, key_value_seq_lengths=lengths, **more, **options
        )
        return run.forward(plan.plan_forward(spec, 132), operands, HOPPER)

    clear()
    index = functools.partial(array, dtype=jnp.int32)
    shapes = array(batch, queries, heads, head_dim), pages
    scaled = ("k_scale", "v_scale") if "scales" in cache else ()
    scales = {name: array(*cache["scales"], dtype=float32) for name in scaled}
    jax.jit(forward).lower(*shapes, index(batch, length // page_size), index(batch), scales).compile()
    return reported()["forward"]


def clear() -> None:
    """Remove what Mosaic GPU left of kernels before."""
    for path in DIRECTORY.iterdir():
        path.unlink()


def reported() -> dict:
    """What ptxas said of each kernel since `clear`."""
    reports = {}
    for path in sorted(DIRECTORY.glob("*.ptxas")):
        text = path.read_text()
        kernel = re.match(r"jflash_([a-z_]+?)_\d", path.name)[1]
        spills = max(map(int, re.findall(r"(\d+) bytes spill stores", text)), default=0)
        reports[kernel] = dict(spills=spills, serialised=bool(re.search(r"C75\d\d.*serialized", text)))
    return reports


if __name__ == "__main__":
    main()
