"""What a server decides between two steps: which tokens come next, and in which pages of the cache their keys go.

Every running request has tokens that are not in the cache yet: its prompt, or the one token that it got last. A step
takes those that decode first, and fills the room that is left with pieces of prompts, the oldest request's first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and what came of it so far."""

    prompt: tuple[int, ...]
    wanted: int
    """How many tokens it asks for."""
    arrival: int
    """The step from which on it may be served."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """The prompt, and behind it the tokens that it got."""
    computed: int = 0
    """How many tokens have their keys in the cache."""
    pages: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0
    """How many of its pages another request had filled."""

    @property
    def got(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """How many tokens are to be computed."""
        return len(self.tokens) - self.computed


class PagePool:
    """The pages of a cache: who uses them, and which hold the beginning of a prompt that others may have too."""

    def __init__(self, count: int, page_size: int):
        """All are free."""
        self.page_size = page_size
        self.free = list(range(count))
        self.most_used = 0
        self._users = [0] * count
        self._prefixes: dict[tuple[int, ...], int] = {}

    def admit(self, request: Request) -> bool:
        """Gives a request all pages that it will ever need; or none, if there are too few."""
        size, shared = self.page_size, []
        # The last token of a prompt is always computed: the next comes from it.
        for stop in range(size, len(request.prompt), size):
            page = self._prefixes.get(request.prompt[:stop])
            if page is None:
                break
            shared.append(page)
        more = -(-(len(request.prompt) + request.wanted - 1) // size) - len(shared)
        if more > len(self.free):
            return False
        request.pages = shared + [self.free.pop() for _ in range(more)]
        for page in request.pages:
            self._users[page] += 1
        request.shared, request.computed = len(shared), len(shared) * size
        self.most_used = max(self.most_used, len(self._users) - len(self.free))
        return True

    def publish(self, request: Request) -> None:
        """Lets others find the pages that the request's prompt has filled."""
        for index in range(min(request.computed, len(request.prompt)) // self.page_size):
            self._prefixes.setdefault(request.prompt[: (index + 1) * self.page_size], request.pages[index])

    def release(self, request: Request) -> None:
        """Take back the pages that no request uses any more."""
        for page in request.pages:
            self._users[page] -= 1
        gone = {page for page in request.pages if self._users[page] == 0}
        self._prefixes = {prefix: page for prefix, page in self._prefixes.items() if page not in gone}
        self.free.extend(gone)


class Step(NamedTuple):
    """The arrays of one step; their shapes are the same for every step."""

    tokens: np.ndarray
    """`[budget]`, of all sequences, one after the other."""
    positions: np.ndarray
    """`[budget]`, of the tokens in their sequences."""
    last: np.ndarray
    """`[slots]`, where the last token of each sequence is."""
    kv_lens: np.ndarray
    page_indices: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    """This array and the three above are arguments of `jflash.ragged_paged_attention`."""


class Scheduler:
    """Requests that wait and requests that run."""

    def __init__(self, requests: Sequence[Request], pool: PagePool, *, slots: int, budget: int, width: int):
        """Up to `slots` run at once, on up to `budget` tokens a step and `width` pages each."""
        self.pool = pool
        self.steps = 0
        self._waiting = sorted(requests, key=lambda request: request.arrival)
        self._running: list[Request] = []
        self._shape = slots, budget, width
        self._batch: list[tuple[Request, int]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a request is not done."""
        return bool(self._waiting or self._running)

    def next_step(self) -> Step:
        """The tokens of the next step.

        Raises:
          ValueError: if a request needs more pages than there are.
        """
        slots, budget, width = self._shape
        if not self._running:
            self.steps = max(self.steps, self._waiting[0].arrival)
        while self._waiting and self._waiting[0].arrival <= self.steps and len(self._running) < slots:
            request = self._waiting[0]
            request.tokens = list(request.prompt)
            if not self.pool.admit(request):
                break
            self._running.append(self._waiting.pop(0))
        if not self._running:
            raise ValueError("`pages` are too few for one request.")
        step = Step(
            tokens=np.zeros(budget, np.int32),
            positions=np.zeros(budget, np.int32),
            last=np.zeros(slots, np.int32),
            kv_lens=np.zeros(slots, np.int32),
            page_indices=np.zeros((slots, width), np.int32),
            cu_q_lens=np.zeros(slots + 1, np.int32),
            num_seqs=np.zeros(1, np.int32),
        )
        self._batch, used = [], 0
        for request in sorted(self._running, key=lambda request: request.pending > 1):
            count = min(request.pending, budget - used)
            if count == 0:
                break
            row, stop = len(self._batch), request.computed + count
            step.tokens[used : used + count] = request.tokens[request.computed : stop]
            step.positions[used : used + count] = np.arange(request.computed, stop)
            used += count
            step.last[row], step.kv_lens[row], step.cu_q_lens[row + 1] = used - 1, stop, used
            step.page_indices[row, : len(request.pages)] = request.pages
            self._batch.append((request, count))
        step.num_seqs[0] = len(self._batch)
        return step

    def advance(self, following: np.ndarray) -> int:
        """Takes the tokens `[slots]` that follow the last of each sequence; returns how many requests got one."""
        self.steps += 1
        got = 0
        for (request, count), token in zip(self._batch, following.tolist(), strict=False):
            request.computed += count
            self.pool.publish(request)
            if request.pending > 0:
                continue
            request.tokens.append(token)
            got += 1
            if len(request.got) == request.wanted:
                self.pool.release(request)
                self._running.remove(request)
        return got
