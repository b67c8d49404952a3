"""Real text that every machine has: the source of Python's standard library, a token for each character."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

TOKENS = 96
"""The number of tokens: the newline is 0, the printable ASCII characters follow from the space, 1, to the tilde, 95."""


def standard_library(characters: int = 500_000) -> np.ndarray:
    """The first `characters` tokens of the library's modules, in the order of their names, int32.

    Characters that are no token are left out.

    Raises:
      ValueError: if the library holds fewer.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    codes = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)
    newline, printable = codes == ord("\n"), (codes >= ord(" ")) & (codes <= ord("~"))
    tokens = np.where(newline, 0, codes.astype(np.int32) - ord(" ") + 1)[newline | printable]
    if len(tokens) < characters:
        raise ValueError(f"`characters` must be at most the {len(tokens)} found in {folder}. Got {characters}.")
    return tokens[:characters]


def batches(tokens: np.ndarray, *, steps: int, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """`steps` arrays `[batch, length + 1]` of neighbouring tokens, from places drawn at random; a seed fixes them."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(len(tokens) - length, size=(batch, 1))
        yield tokens[starts + np.arange(length + 1)]
