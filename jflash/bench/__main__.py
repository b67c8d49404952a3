"""Time attention on this machine, by jflash and by the other libraries that are installed.

python -m jflash.bench                                   the table of this machine
python -m jflash.bench --features --output results       options too; also results/bench.json and pictures
python -m jflash.bench --from results/bench.json --output results       pictures again, measuring nothing
python -m jflash.bench --tune                            find this device's fastest tiles, and keep them
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("matplotlib", "platformdirs", "rich", "tyro")


def main(arguments: list[str] | None = None) -> None:
    """Measure, or read, and show."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"python -m jflash.bench needs {', '.join(missing)}: pip install '.[benchmark]'")
    # Only now: these import them.
    from jflash.bench import command

    command.main(arguments)


if __name__ == "__main__":
    main()
