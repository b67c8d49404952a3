"""What jax.nn makes of the calls: cuDNN's custom calls, in programs that are lowered for a Blackwell."""

import json
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"
WITH_CUDNN = f"""
import sys, types
# JAX asks its plugin for the version, which is here the oldest that the plugin of jax 0.11.2 for CUDA 13 takes.
sys.modules["jax_cuda13_plugin._versions"] = types.SimpleNamespace(cudnn_get_version=lambda: 91200)
sys.path.insert(0, {str(SUPPORT)!r})
import cudnn_programs
cudnn_programs.main()
"""
FORWARD, BACKWARD = "fmhaSoftmax", "fmhaSoftmaxBackward"


def test_programs():
    """In one process, as most of the time is its start."""
    done = subprocess.run([sys.executable, "-c", WITH_CUDNN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout)
    # The forward in a gradient's backward is not used, and no compiler keeps it.
    of_gradient = lambda told: [f"{FORWARD} {told}", f"{FORWARD} {told}", f"{BACKWARD} {told}"]
    assert programs.pop("forward") == [f"{FORWARD} NO_MASK 0"]
    assert programs.pop("gradient") == of_gradient("CAUSAL 0")
    assert programs.pop("window") == of_gradient("CAUSAL 41")
    assert programs.pop("lengths") == [f"{FORWARD} PADDING_CAUSAL 0"]
    assert programs.pop("vmap") == of_gradient("NO_MASK 0")
    assert programs.pop("shard_map") == of_gradient("CAUSAL 0")
    assert programs.pop("replaced") == [f"{FORWARD} NO_MASK 0"]
    # As jflash calls it jax.nn keeps to strict promotion too.
    assert programs.pop("strict") == of_gradient("PADDING_CAUSAL 0")
    query, key, value, out, lse, d_out = (f"%arg{index}" for index in range(6))
    assert programs.pop("backward operands") == [query, key, value, lse, d_out, out]
    assert not programs
