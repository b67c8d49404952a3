"""An H200 as XLA's target, on a machine without one."""

from __future__ import annotations

from pathlib import Path

from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jflash import _platform
from jflash._platform import Platform

CONFIG = (Path(__file__).parent / "h200.txtpb").read_text()
"""What XLA's compiler knows of the GPU."""

H200 = Platform("gpu", "NVIDIA H200", "9.0", 132)


def over(devices: int, split: PartitionSpec, config: str = CONFIG) -> NamedSharding:
    """Arrays split over `devices` H200s, or over GPUs of another configuration."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{devices}")
    return NamedSharding(topologies.make_mesh(topology, (devices,), ("x",)), split)


def is_the_target() -> None:
    """Let calls that are lowered be served as on an H200."""
    _platform.lowering_targets = lambda _: {"cuda": H200}
