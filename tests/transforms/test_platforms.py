"""The backend follows the platform that a call is lowered for, under every transform.

This machine has CPU devices only. So a backend of our own stands in for a GPU's kernels: it serves nothing but CUDA,
and cannot be lowered for another platform.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from equations import equations
from h200 import H200
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from operands import (
    ALL,
    PLAIN,
    Operands,
    assert_same,
    attend,
    attend_and_pull_back,
    jit,
    loss,
    pull_back,
    reference,
    stack,
)
from short_run import cover

import jflash
from jflash import _dispatch, _platform
from jflash._backends import mosaic_gpu
from jflash._backends import reference as reference_backend
from jflash._platform import Platform
from jflash._semantics.spec import Operands as Canonical
from jflash._semantics.spec import Residuals, Spec

P = PartitionSpec
SPLIT = P("x", None, "y")
CPU = Platform("cpu", "cpu", None)
KERNEL = "stablehlo.cbrt"
"""The operation that stands for the kernel of the backend below in a lowered program: nothing else takes cubic
roots."""

_kernel = Primitive("cuda_kernel")
_kernel.def_abstract_eval(lambda out: out)
mlir.register_lowering(_kernel, mlir.lower_fun(lax.cbrt, multiple_results=False), platform="cuda")


class CudaOnly(types.SimpleNamespace):
    """`reference` and a kernel; with what it was told of the platform, forward and backward."""

    def __init__(self) -> None:
        super().__init__(told=[])

    def unsupported(self, spec: Spec, platform: Platform) -> str | None:
        return None if platform.name == "gpu" else f"it needs CUDA, and this is {platform}."

    def forward(self, spec: Spec, operands: Canonical) -> tuple[jax.Array, jax.Array]:
        self.told.append(_platform.current())
        out, lse = reference_backend.forward(spec, operands)
        return _kernel.bind(out), lse

    def backward(self, spec: Spec, operands: Canonical, residuals: Residuals) -> Canonical:
        """Return the gradients, also of operands that are not differentiated; but the sinks' is left out."""
        self.told.append(_platform.current())
        _, vjp = jax.vjp(functools.partial(reference_backend.forward, spec), operands)
        (gradients,) = vjp((residuals.d_out, residuals.d_lse))
        none_of_integers = lambda array: None if array.dtype == jax.dtypes.float0 else array
        gradients = jax.tree.map(none_of_integers, gradients)
        return gradients._replace(query=_kernel.bind(gradients.query), sinks=None)


@pytest.fixture
def cuda_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnly]:
    """The first backend that is asked. Compiled calls are found again by its name, so they are forgotten."""
    backend = CudaOnly()
    jax.clear_caches()
    monkeypatch.setattr(_dispatch, "BACKENDS", {"cuda_only": backend, **_dispatch.BACKENDS})
    yield backend
    jax.clear_caches()


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's first device is a GPU, as far as jflash knows; the arrays are on the CPU all the same."""
    others = {"cpu": CPU, "rocm": Platform("gpu", "unknown", None), "default": Platform("another", "unknown", None)}
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cuda": H200, **others})


def lowered(function: Callable[..., Any], *args: Any, platform: str) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def on_eight_devices(kind: AxisType) -> tuple[Mesh, Operands]:
    """A mesh, and operands whose batch and heads are split over it."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    wide = {name: jnp.concatenate([array, array + 1], axis=2) for name, array in PLAIN.items()}
    return mesh, {name: jax.device_put(array, NamedSharding(mesh, SPLIT)) for name, array in wide.items()}


def by_jit(implementation: str | None) -> Any:
    return jit(functools.partial(attend_and_pull_back, implementation=implementation))(ALL)


def by_eager(implementation: str | None) -> Any:
    return attend_and_pull_back(jax.device_put(PLAIN, jax.devices()[3]), implementation)


def by_vmap(implementation: str | None) -> Any:
    several = stack([PLAIN, jax.tree.map(jnp.cos, PLAIN)])
    return jit(jax.vmap(functools.partial(attend_and_pull_back, implementation=implementation)))(several)


def by_checkpoint(implementation: str | None) -> Any:
    return jit(jax.grad(jax.checkpoint(functools.partial(loss, implementation=implementation))))(PLAIN)


def by_scan(implementation: str | None) -> Any:
    def body(query: jax.Array, _: None) -> tuple[jax.Array, None]:
        operands = {"query": query, "key": PLAIN["key"], "value": PLAIN["key"]}
        return attend(operands, implementation)[0], None

    return jit(jax.grad(lambda query: lax.scan(body, query, length=2)[0].sum()))(PLAIN["query"])


def by_export(implementation: str | None) -> Any:
    function = jax.jit(functools.partial(attend, implementation=implementation))
    exported = jax.export.export(function, platforms=["cpu", "cuda"])(PLAIN)
    return pull_back(jax.export.deserialize(exported.serialize(vjp_order=1)).call, PLAIN)


def by_sharded_jit(implementation: str | None, kind: AxisType = AxisType.Auto) -> Any:
    _, split = on_eight_devices(kind)
    return jit(functools.partial(attend_and_pull_back, implementation=implementation))(split)


def by_shard_map(implementation: str | None, check_vma: bool = True) -> Any:
    mesh, split = on_eight_devices(AxisType.Auto)
    function = functools.partial(attend, implementation=implementation)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=check_vma)
    return jit(functools.partial(pull_back, mapped))(split)


TRANSFORMS: dict[str, Callable[[str | None], Any]] = {
    "jit": by_jit,
    "eager": by_eager,
    "vmap": by_vmap,
    "checkpoint": by_checkpoint,
    "scan": by_scan,
    "export": by_export,
    "sharded_jit": by_sharded_jit,
    "explicit_mesh": functools.partial(by_sharded_jit, kind=AxisType.Explicit),
    "shard_map": by_shard_map,
    "shard_map_unchecked": functools.partial(by_shard_map, check_vma=False),
}
IN_SHORT_RUN = ("jit", "export", "shard_map")


@pytest.mark.parametrize(
    "transform", [pytest.param(name, marks=() if name in IN_SHORT_RUN else cover(0)) for name in TRANSFORMS]
)
def test_cpu_arrays_never_meet_a_gpu_kernel(cuda_only: CudaOnly, gpu_machine: None, transform: str) -> None:
    """Though the backend is the first to serve on the machine's first device, and its program is traced."""
    assert_same(TRANSFORMS[transform](None), TRANSFORMS[transform]("reference"))
    assert cuda_only.told


def test_hopper_kernels_stay_on_the_gpu(gpu_machine: None) -> None:
    """The same of the kernels that the backend above stands in for."""
    operands = {name: jnp.zeros((1, 128, 2, 64), jnp.bfloat16) for name in PLAIN}
    assert jflash.explain(**operands).startswith("mosaic_gpu serves")
    function = functools.partial(attend_and_pull_back, implementation=None)
    (out, _), gradients = jit(function)(operands)
    assert out.sum() == 0
    assert set(gradients) == set(PLAIN)

    assert "mosaic_gpu" in lowered(function, operands, platform="cuda")
    assert "mosaic_gpu" not in lowered(function, operands, platform="cpu")
    unpromised = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(jax.jit(function), platforms=["cpu", "cuda"], disabled_checks=unpromised)(operands)
    assert "mosaic_gpu" in exported.mlir_module()
    assert exported.call(operands)[0][0].sum() == 0


@pytest.mark.parametrize("function", [attend, attend_and_pull_back])
def test_lowering_decides(cuda_only: CudaOnly, function: Callable[..., Any]) -> None:
    """Lowering decides, also on this machine, which has no GPU; and each program is told of its own platform."""
    text = functools.partial(lowered, functools.partial(function, implementation=None), PLAIN)
    assert KERNEL in text(platform="cuda")
    assert KERNEL not in text(platform="cpu")
    assert KERNEL not in text(platform="tpu")
    assert {platform.name for platform in cuda_only.told} == {"gpu"}


def test_export_for_two_platforms_holds_both_programs(cuda_only: CudaOnly) -> None:
    function = jax.jit(functools.partial(attend_and_pull_back, implementation=None))
    text = lambda *platforms: jax.export.export(function, platforms=platforms)(PLAIN).mlir_module()
    both, cpu, cuda = text("cpu", "cuda"), text("cpu"), text("cuda")
    assert [KERNEL in module for module in (both, cpu, cuda)] == [True, False, True]
    assert len(both) > max(len(cpu), len(cuda))


def test_kernels_are_planned_for_the_gpu_that_is_lowered_for(
    gpu_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jflash._backends.mosaic_gpu import plan

    planned: list[int | None] = []

    def recorded(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (planned.append(args[-1]), real(*args))[1]

    monkeypatch.setattr(plan, "plan_forward", recorded(plan.plan_forward))
    monkeypatch.setattr(plan, "plan_backward", recorded(plan.plan_backward))
    operands = {name: jnp.zeros((1, 128, 2, 56), jnp.bfloat16) for name in PLAIN}
    jax.eval_shape(functools.partial(attend_and_pull_back, implementation=None), operands)
    assert set(planned) == {H200.processors}
    assert len(planned) >= 2
    assert _platform.current() == CPU


REFUSED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda function: jax.jit(function).lower(PLAIN),
    "eager": lambda function: function(PLAIN),
    "vmap": lambda function: jax.jit(jax.vmap(function)).lower(stack([PLAIN, PLAIN])),
    "export": lambda function: jax.export.export(jax.jit(function), platforms=["cuda", "cpu"])(PLAIN),
    "sharded_jit": lambda function: jax.jit(function).lower(on_eight_devices(AxisType.Auto)[1]),
    "explicit_mesh": lambda function: jax.jit(function).lower(on_eight_devices(AxisType.Explicit)[1]),
}


@cover(1)
@pytest.mark.parametrize("function", [attend, attend_and_pull_back])
@pytest.mark.parametrize("transform", REFUSED)
def test_no_backend_serves_where_it_is_lowered(
    cuda_only: CudaOnly, transform: str, function: Callable[..., Any]
) -> None:
    """Said at lowering, with the reasons: before that the call may go anywhere."""
    call = functools.partial(function, implementation="cuda_only")
    jax.eval_shape(call, PLAIN)
    assert KERNEL in lowered(call, PLAIN, platform="cuda")
    with pytest.raises(NotImplementedError, match="lowered for") as caught:
        REFUSED[transform](call)
    assert str(caught.value).splitlines()[1:] == ["  cuda_only: it needs CUDA, and this is cpu."]


def test_refusal_in_shard_map(cuda_only: CudaOnly) -> None:
    with pytest.raises(NotImplementedError, match="it needs CUDA"):
        by_shard_map("cuda_only")


def test_derivatives_where_another_platform_is_refused() -> None:
    """`xla` promises no order of sums to arrays inside a `score_mod` on a GPU; here it has every derivative."""
    operands = {name: ALL[name] for name in (*PLAIN, "modulation")}

    def penalty(query: jax.Array, implementation: str) -> jax.Array:
        function = lambda query: attend({**operands, "query": query}, implementation, deterministic=True)[0].sum()
        return (jax.grad(function)(query) ** 2).sum()

    second = lambda implementation: jax.grad(functools.partial(penalty, implementation=implementation))
    assert_same(jit(second("xla"))(ALL["query"]), jit(second("reference"))(ALL["query"]))
    with pytest.raises(NotImplementedError, match=r"xla: deterministic=True.*on a GPU"):
        lowered(second("xla"), ALL["query"], platform="cuda")
    assert "stablehlo" in lowered(second("xla"), ALL["query"], platform="cpu")


@cover(0)
def test_backend_without_backward_beside_one_with(cuda_only: CudaOnly, gpu_machine: None) -> None:
    assert_same(
        jit(functools.partial(attend_and_pull_back, implementation=("cuda_only", "reference")))(ALL), reference(ALL)
    )


@pytest.mark.parametrize("other", ["xla", pytest.param("reference", marks=cover(0))])
def test_second_derivatives_are_those_of_plain_jax(cuda_only: CudaOnly, gpu_machine: None, other: str) -> None:
    """Second derivatives are those of `xla`; on each platform, the first are its own backend's."""

    def second(implementation: Any) -> Callable[[jax.Array], jax.Array]:
        gradient = jax.grad(lambda query: loss({**PLAIN, "query": query}, implementation))
        return jax.grad(lambda query: (gradient(query) ** 2).sum())

    assert_same(jit(second(("cuda_only", other)))(PLAIN["query"]), jit(second("reference"))(PLAIN["query"]))
    assert KERNEL in lowered(second(("cuda_only", other)), PLAIN["query"], platform="cuda")
    assert KERNEL in lowered(second("cuda_only"), PLAIN["query"], platform="cuda")


def programs(function: Callable[..., Any], *args: Any) -> set[int]:
    """Return among how many programs lowering chooses for a call, its tangent and its gradient; one of them is traced
    before, but for a tangent."""
    every = equations(jax.make_jaxpr(function)(*args).jaxpr)
    calls = [equation.params for equation in every if equation.primitive.name == "jflash"]
    assert all(len(call["jaxprs"]) == (getattr(call["operation"], "kind", None) != "tangent") for call in calls)
    return {len(getattr(call["operation"].choice, "programs", (None,))) for call in calls}


@pytest.mark.parametrize("function", [attend, attend_and_pull_back])
@pytest.mark.parametrize(("implementation", "count"), [(None, {2}), ("xla", {2}), ("reference", set())])
def test_one_backend_everywhere_has_a_program_for_cpus_and_one_for_all_else(
    function: Callable[..., Any], implementation: str | None, count: set[int]
) -> None:
    """`xla` plans for either. Within a program, what is in plain JAX has no choice."""
    assert programs(functools.partial(function, implementation=implementation), ALL) - {1} == count


def test_several_programs_where_several_backends_serve(cuda_only: CudaOnly) -> None:
    count = lambda name: programs(functools.partial(attend_and_pull_back, implementation=name), PLAIN)
    assert count(None) == {1, 3}
    assert count("cuda_only") == {1}


def test_explain_follows_the_arrays(cuda_only: CudaOnly, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` follows the arrays, not the first device; arrays that are bound to none go where JAX's default is."""
    monkeypatch.setattr(_platform, "current", lambda: H200)
    on_cpu = jax.device_put(PLAIN, jax.devices("cpu")[3])
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), on_cpu)
    unbound = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), on_cpu)
    abstract = NamedSharding(jax.sharding.AbstractMesh((1,), ("x",)), P())
    elsewhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=abstract), on_cpu)
    for operands in (on_cpu, described, {**PLAIN, "value": on_cpu["value"]}, on_eight_devices(AxisType.Auto)[1]):
        assert jflash.explain(**operands).startswith("xla serves this call on cpu.")
        assert "cuda_only: it needs CUDA, and this is cpu." in jflash.explain(**operands)
    for operands in (unbound, elsewhere, PLAIN):
        assert jflash.explain(**operands).startswith("cuda_only serves this call on gpu")


def test_explain_verbose_describes_the_choice(cuda_only: CudaOnly) -> None:
    plain = jflash.explain(**PLAIN, implementation=["cuda_only", "reference"]).splitlines()
    verbose = jflash.explain(**PLAIN, implementation=["cuda_only", "reference"], verbose=True).splitlines()
    assert verbose == [*plain, "derivatives: all by JAX, of the forward"]
    asked: list[Any] = []
    cuda_only.unsupported = lambda spec, platform: None
    cuda_only.describe = lambda spec, platform: asked.append((spec.heads, platform)) or "one kernel,\nno copies"
    plain, derivatives = (
        jflash.explain(**PLAIN),
        "derivatives: tangent by xla, backward by cuda_only, all others by xla",
    )
    described = [*plain.splitlines(), "one kernel,", "no copies", derivatives]
    assert jflash.explain(**PLAIN, verbose=True).splitlines() == described
    assert asked == [(4, CPU)]
    empty = {name: array[:, :0] for name, array in PLAIN.items()}
    assert jflash.explain(**empty, verbose=True) == jflash.explain(**empty)
    with pytest.raises(TypeError, match="`verbose`"):
        jflash.explain(**PLAIN, verbose=1)  # pyright: ignore[reportArgumentType]


def test_xla_describes_its_tiles() -> None:
    query, key = (jax.ShapeDtypeStruct((2, 4096, heads, 64), jnp.bfloat16) for heads in (8, 4))
    explain = functools.partial(jflash.explain, query, key, key, implementation="xla", verbose=True)
    _, forward, backward, memory, _ = explain().splitlines()
    held = "1 of 2 batch entries and {} of 8 heads at a time: 4 MiB of float32 logits"
    assert forward == f"forward: tiles of 256 queries by 512 keys, {held.format(8)}"
    assert backward == f"backward: tiles of 128 queries by 4096 keys, {held.format(2)}, computed again"
    assert explain(is_causal=True).splitlines()[2].endswith("computed again from the log-sum-exp")
    assert memory.startswith("memory")
    small = jax.ShapeDtypeStruct((1, 128, 8, 64), jnp.float32)
    _, forward, backward, *_ = jflash.explain(small, small, small, implementation="xla", verbose=True).splitlines()
    one = "one tile, without a loop: 0.5 MiB of float32 logits"
    assert forward == f"forward: {one}"
    assert backward == f"backward: {one}, the forward's if compiled with it"


def test_xla_describes_its_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_platform, "current", lambda: H200)
    array = jax.ShapeDtypeStruct((1, 16384, 16, 128), jnp.float32)
    explain = functools.partial(jflash.explain, implementation="xla", verbose=True)
    _, forward, backward, *_ = explain(array, array, array).splitlines()
    tiles = "tiles of 4096 queries by 4096 keys, 1 of 1 batch entries and 8 of 16 heads at a time: 5.1e+02 MiB"
    assert forward == f"forward: {tiles} of float32 logits"
    assert backward == f"backward: {tiles} of float32 logits, computed again from the log-sum-exp"
    small = jax.ShapeDtypeStruct((32, 512, 16, 128), jnp.float32)
    _, forward, *_ = explain(small, small, small).splitlines()
    assert forward == "forward: one tile, without a loop: 5.1e+02 MiB of float32 logits"


def test_nothing_is_described_where_nothing_serves() -> None:
    refused = jflash.explain(**PLAIN, implementation="mosaic_gpu")
    assert jflash.explain(**PLAIN, implementation="mosaic_gpu", verbose=True) == refused


def test_platforms_of_this_machine() -> None:
    targets = _platform.lowering_targets(PLAIN.values())
    assert list(targets) == ["cpu", "cuda", "rocm", _platform.ELSEWHERE]
    assert targets["cpu"] == _platform.current() == CPU
    assert mosaic_gpu.unsupported(None, targets["cuda"])  # pyright: ignore[reportArgumentType]
    with _platform.lowered_for(H200):
        assert _platform.current() == H200
        with _platform.lowered_for(CPU):
            assert _platform.current() == CPU
        assert _platform.current() == H200
