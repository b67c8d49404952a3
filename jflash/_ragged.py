"""Sequences of different lengths, one after the other in an array of tokens, whose keys are in a paged cache.

The arrays that describe such a batch have static shapes and traced contents, so one compiled program serves every
batch. Only what they say of the first `num_seqs` sequences counts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jflash import _arguments
from jflash._semantics.search import count_up_to


class Ragged(NamedTuple):
    """A step's tokens: sequence i has those from `cu_q_lens[i]` to `cu_q_lens[i + 1]`, the last of its keys."""

    kv_lens: Int[Array, "seqs"]
    page_indices: Int[Array, "seqs pages"]
    cu_q_lens: Int[Array, "seqs+1"]
    num_seqs: Int[Array, "1"]

    def check(self) -> None:
        """Check shapes and dtypes.

        Raises:
          ValueError, TypeError: if one is wrong.
        """
        for name, array in self._asdict().items():
            _arguments.integers(name, array)
        if self.page_indices.ndim != 2:
            raise ValueError(
                f"`page_indices` must have the shape (max_num_seqs, pages). Got {self.page_indices.shape}."
            )
        seqs = self.page_indices.shape[0]
        for name, shape in (("kv_lens", (seqs,)), ("cu_q_lens", (seqs + 1,)), ("num_seqs", (1,))):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"`{name}` must have the shape {shape}, as `page_indices` has {seqs} rows. "
                    f"Got {getattr(self, name).shape}."
                )

    def in_32_bits(self) -> Ragged:
        """Return the same batch as JAX arrays of int32."""
        return Ragged(*(jnp.asarray(array).astype(jnp.int32) for array in self))

    @property
    def query_lengths(self) -> Int[Array, "seqs"]:
        """The number of each sequence's tokens in the step; 0 for rows past the last sequence."""
        is_one = jnp.arange(len(self.kv_lens)) < self.num_seqs
        return jnp.where(is_one, self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)

    def tokens(self, count: int) -> Tokens:
        """Return where each of `count` tokens belongs."""
        token = jnp.arange(count, dtype=jnp.int32)
        stops = jnp.where(jnp.arange(len(self.kv_lens)) < self.num_seqs, self.cu_q_lens[1:], count)
        sequence = jnp.minimum(count_up_to(stops, token), len(stops) - 1)
        place = token - self.cu_q_lens[sequence]
        is_one = (token >= self.cu_q_lens[0]) & (token < jnp.take(self.cu_q_lens, self.num_seqs[0], mode="clip"))
        return Tokens(sequence, place, self.kv_lens[sequence] - self.query_lengths[sequence] + place, is_one)

    def blocks(self, tokens: int, rows: int) -> Blocks:
        """Return all `tokens` in blocks of up to `rows`, in order, each of one sequence or of none.

        There are as many blocks as there can ever be. Some have no tokens, behind those of any sequence: so the number
        of a sequence's first block follows from its first token alone.
        """
        seqs = len(self.kv_lens)
        # Tokens of no sequence, which have no keys, are before the first sequence and after the last.
        begins = jnp.where(jnp.arange(seqs + 1) <= self.num_seqs, jnp.clip(self.cu_q_lens, 0, tokens), tokens)
        starts, stops = jnp.pad(begins, (1, 0)), jnp.pad(begins, (0, 1), constant_values=tokens)
        # Of r rows ceil((stop - start) / r) <= stop // r - start // r + 1, and of one row without the 1.
        spare = int(rows > 1)
        first_blocks = starts // rows + spare * jnp.arange(len(starts))
        most = tokens // rows + spare * len(starts)
        # A multiple of 16, so that a backend can take several at a time.
        most = most if most < 16 else -(-most // 16) * 16
        next_blocks = jnp.append(first_blocks[1:], most)
        sequence = jnp.clip(jnp.arange(-1, seqs + 1, dtype=jnp.int32), 0, seqs - 1)
        kv_lens = jnp.pad(jnp.where(jnp.arange(seqs) < self.num_seqs, self.kv_lens, 0), 1)

        of_stretch = first_blocks, next_blocks, starts, stops, sequence, kv_lens
        first_block, next_block, first, stop, sequence, kv_len = (numbers[None] for numbers in of_stretch)
        block = jnp.arange(most, dtype=jnp.int32)[:, None]
        start = jnp.minimum(first + (block - first_block) * rows, stop)
        count = jnp.minimum(stop - start, rows)
        keys = jnp.where(count > 0, kv_len, 0)
        is_own = (first_block <= block) & (block < next_block)
        # XLA makes one kernel of sums over all stretches, of which one is the block's, and three of looking it up.
        of_own = lambda numbers: jnp.sum(jnp.where(is_own, numbers, 0), axis=1, dtype=jnp.int32)
        return jax.tree.map(of_own, Blocks(sequence, start, count, keys - (stop - start), keys))


class Tokens(NamedTuple):
    """The place of each token of a step."""

    sequence: Int[Array, "tokens"]
    place: Int[Array, "tokens"]
    """The token's index among the sequence's tokens of this step."""
    position: Int[Array, "tokens"]
    """The token's index among the sequence's keys."""
    is_one: Bool[Array, "tokens"]
    """Whether it belongs to a sequence; else the rest of its row means nothing."""


class Blocks(NamedTuple):
    """Blocks of a step's tokens."""

    sequence: Int[Array, "blocks"]
    """The block's sequence; any, where it has no keys."""
    start: Int[Array, "blocks"]
    """The block's first token in the array of all tokens; their number for blocks without tokens."""
    tokens: Int[Array, "blocks"]
    """The number of the block's tokens."""
    position: Int[Array, "blocks"]
    """The index of the block's first token among the sequence's keys."""
    keys: Int[Array, "blocks"]
    """The number of the sequence's keys; 0 for tokens of no sequence."""
