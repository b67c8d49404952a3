"""The backend that serves a call on each platform that JAX may lower it for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jflash import _platform
from jflash._platform import Platform


class Program(NamedTuple):
    """A backend, and where it serves a call."""

    backend: str
    targets: tuple[str, ...]
    """The platforms, by the names of `_platform.lowering_targets`."""
    platform: Platform
    """The first platform of the targets. The backend is traced once, for this one."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that serves a call on each platform that JAX may lower it for."""

    programs: tuple[Program, ...]
    refusals: tuple[tuple[str, str], ...]
    """The platforms on which no backend serves, with the reasons."""
    names: tuple[str, ...] | None
    """The backends that were asked, in order; `None`: as the platform has them (`_dispatch.in_order`)."""

    def serving(self, target: str) -> int:
        """Return the index of the program for a platform, by JAX's name for lowering.

        Raises:
          NotImplementedError: if no backend serves there; the message says why.
        """
        programs = {name: index for index, program in enumerate(self.programs) for name in program.targets}
        refusals = dict(self.refusals)
        target = target if target in programs or target in refusals else _platform.ELSEWHERE
        if target in refusals:
            raise NotImplementedError(
                f"No implementation can serve this call on the platform it is lowered for.\n{refusals[target]}"
            )
        return programs[target]
