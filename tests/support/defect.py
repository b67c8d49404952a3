"""A defect that can be planted: a piece of text in a definition, and what takes its place."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Defect:
    """One wrong piece of source."""

    name: str
    definition: str
    """The function, class or constant that has the text, by the end of its qualified name."""
    right: str
    wrong: str
    first: str
    """The test that is to notice it."""

    def places(self) -> list[tuple[Path, int]]:
        """Return the files that have the text in a definition of the name, and where in each it begins."""
        return [
            (path, found.start())
            for path, text in sources().items()
            if self.right in text
            for start, stop in spans(path, self.definition)
            for found in re.finditer(re.escape(self.right), text[:stop])
            if found.start() >= start
        ]

    def plant(self, root: Path) -> None:
        """Put the wrong text in the place of the right one, in a copy of the repository."""
        ((path, start),) = self.places()
        text = sources()[path]
        changed = text[:start] + self.wrong + text[start + len(self.right) :]
        (root / path.relative_to(ROOT)).write_text(changed)


@functools.cache
def sources() -> dict[Path, str]:
    """Return the text of every file in which defects are planted."""
    files = (path for package in ("jflash", "jflash_metal") for path in sorted((ROOT / package).rglob("*.*")))
    return {path: path.read_text() for path in files if path.suffix in (".py", ".h")}


def spans(path: Path, definition: str) -> list[tuple[int, int]]:
    """Return where in a file the definitions of a qualified name begin and end."""
    *_, name = definition.split(".")
    if path.suffix == ".h":
        # A function ends where a line is its closing brace alone.
        functions = re.finditer(
            rf"^[a-z][^;{{}}]* {re.escape(name)}\(.*?^}}$", sources()[path], re.MULTILINE | re.DOTALL
        )
        return [function.span() for function in functions]
    lines = [0]
    for line in sources()[path].splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = (node for name, node in definitions(ast.parse(sources()[path])) if f".{name}".endswith(f".{definition}"))
    return [(lines[node.lineno - 1], lines[node.end_lineno]) for node in found]


def definitions(scope: ast.AST, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and constants of a scope with their qualified names."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield within + node.name, node
            yield from definitions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield within + node.targets[0].id, node
        else:
            yield from definitions(node, within)
