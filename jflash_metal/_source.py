"""The source of a shader: the `#define`s of a plan in front of the shader and its headers.

There is one mechanism for every host, and the source has only the features that a call uses. Lengths, strides and the
values of numbers come with the launch (`_parameters`), so calls of other sizes share a source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

SHADERS = Path(__file__).parent / "shaders"


def assemble(shader: str, definitions: Iterable[tuple[str, str | int]]) -> str:
    """Return the text of one self-contained translation unit."""
    values = [(name, int(value) if isinstance(value, bool) else value) for name, value in definitions]
    return "\n".join([*(f"#define {name} {value}" for name, value in values), _inlined(shader, set())])


def _inlined(name: str, seen: set[str]) -> str:
    """Return a shader in which each of its own headers replaces its first `#include`."""
    if name in seen:
        return ""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((SHADERS / name).read_text().splitlines(), 1):
        included = re.fullmatch(r'#include "(.+)"', line)
        if included is not None:
            lines += [_inlined(included[1], seen), f'#line {number + 1} "{name}"']
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)
