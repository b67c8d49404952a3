"""XLA's program of a loop calls each kernel as often as jflash does; compiled for an H200, without one."""

from pathlib import Path

import compilers_wheels
from short_run import cover


@cover(0)
def test_a_kernel_whose_result_a_loop_keeps_runs_once(tmp_path: Path) -> None:
    found = compilers_wheels.run("scan_compile.py", tmp_path)
    assert found["forward"] == 1
    assert set(found.values()) == {1}, found
