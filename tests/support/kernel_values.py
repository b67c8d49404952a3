"""The values whose product the kernels in Pallas Mosaic GPU are tested over."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import cases
from cases import Case

INTERPRETED = dict(
    dtype=("bfloat16", "float16", "float32"),
    query_length=(1, 40, 131),
    heads=((1, 1), (2, 1)),
    scale=(None, "static", "traced"),
    soft_cap=(None, 1.5, 40.0),
    bias=(None, "full", "keys", "queries", "heads"),
    alibi=(False, True),
    score_mod=(None, "indices"),
    mask=(None, "full", "keys", "queries"),
    causal=(False, True),
    offset=(None, "end", "each"),
    window=(None, (40, 10)),
    lengths=(None, "both"),
    segments=(None, "sorted"),
    sinks=(False, True),
    dropout=(False, True),
)
"""In the interpreter, without lengths of keys and head dims."""

ON_HARDWARE = dict(
    dtype=("bfloat16", "float16", "float32"),
    query_length=(1, 13, 128, 199, 257, 523),
    key_length=(1, 17, 128, 131, 293, 640),
    heads=((1, 1), (3, 3), (2, 1), (4, 2), (8, 1)),
    dims=(
        (1, 1),
        (8, 8),
        (33, 70),
        (40, 40),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 128),
        (64, 256),
        (256, 256),
    ),
    batch=((), (2,), (2, 3)),
    **(cases.FEATURES | dict(soft_cap=(None, 1.5, 40.0))),
)
"""On a GPU."""


def drawn(values: Mapping[str, Sequence[Any]], seed: int) -> Case:
    """A case of any values together."""
    choose = random.Random(seed).choice
    return Case(**{name: choose(some) for name, some in values.items()})
