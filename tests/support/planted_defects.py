"""Plants defects in a copy of the repository, one at a time, and shows that the tests of the short run notice each.

    python tests/support/planted_defects.py [--all] [--only WORD]

The defects are in `defects.py`. Each names a definition, and has a piece of text that is found once in definitions of
this name, in whichever files of the packages they are, and what takes its place. For each defect the tool runs the
tests of the short run (`make test`): first those that `defects.py` names for it, then all others, until one fails.
With `--all` it runs the slow tests too where the short run misses a defect.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import tyro
from defect import ROOT, Defect
from defects import DEFECTS
from rich.console import Console
from rich.table import Table

SITE = """
import sys

# An editable installation would give the repository itself in the place of the copy.
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "_editable_skbc_jflash"]
"""


def copy(folder: Path) -> Path:
    """The files that git knows, and the emulator, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    shutil.copytree(ROOT / "jflash_metal" / "native", folder / "jflash_metal" / "native", dirs_exist_ok=True)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    return folder


def failing(root: Path, *arguments: str) -> str | None:
    """The first test that fails; `None` if none does."""
    environment = {**os.environ, "JFLASH_METAL_EMULATOR": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'site'}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py(?:::\w+)?)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(done.stdout + done.stderr)
    return found[1]


def noticed(defect: Defect, *, every: bool) -> tuple[str | None, str | None]:
    """The test of the short run that fails with the defect, and of all tests."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        defect.plant(root)
        short = ["-m", "not slow"]
        by = failing(root, "-p", "no:xdist", *short, defect.first) or failing(root, "-n", "auto", *short)
        if by is None and every:
            return None, failing(root, "-n", "auto", "-m", "slow")
        return by, by


def main(every: Annotated[bool, tyro.conf.arg(name="all")] = False, only: str = "") -> None:
    """Plant each defect and print which tests notice it.

    Args:
      every: show a defect that the short run misses to the slow tests as well.
      only: those defects alone that have this in their name.
    """
    console = Console()
    table = Table("defect", "short run", *(["all tests"] if every else []), "s")
    missed = 0
    for defect in DEFECTS:
        if only not in defect.name:
            continue
        began = time.monotonic()
        short, whole = noticed(defect, every=every)
        missed += short is None
        found = [short, whole] if every else [short]
        row = [defect.name, *(test or "MISSED" for test in found), f"{time.monotonic() - began:.0f}"]
        table.add_row(*row)
        print(" | ".join(row), flush=True)
    console.print(table)
    sys.exit(f"The short run misses {missed}." if missed else 0)


if __name__ == "__main__":
    tyro.cli(main)
