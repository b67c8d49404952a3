"""Time attention on this machine, by jflash and by the other libraries that are installed.

python -m jflash.bench                                   the table of this machine
python -m jflash.bench --features --output results       options too; also results/bench.json and pictures
python -m jflash.bench --lengths --features score_mod    the options that have this in their names, and no grid
python -m jflash.bench --from results/bench.json --output results       pictures again, measuring nothing
python -m jflash.bench --tune                            find this device's fastest tiles, and keep them
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("matplotlib", "platformdirs", "rich", "tyro")


def main(arguments: list[str] | None = None) -> None:
    """Measure, or read a record, and show it.

    Args:
      arguments: the arguments of the command line, which `--help` lists; None for what the program was called with.

    Raises:
      SystemExit: a package that the bench needs is missing, or an argument is wrong; the message says which.

    Example:
      >>> from jflash.bench import __main__ as bench
      >>> bench.main("--lengths 64 --tokens 64 --work fwd --masks full --peers jflash --rounds 1".split())
      <BLANKLINE>
      ...
       full: 1 x 64, 8 x d64 ...
         jflash ...
      <BLANKLINE>
      ...wall clock, median of 1 round; jflash ...
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python -m jflash.bench needs {', '.join(missing)}: pip install '.[benchmark]'")
    # These modules import the packages that were just looked for.
    from jflash.bench import command

    command.main(arguments)


if __name__ == "__main__":
    main()
