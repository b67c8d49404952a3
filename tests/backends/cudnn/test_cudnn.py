"""cuDNN's attention by way of jax.nn: what is handed to it, what is made of what comes back, and what is refused.

jax.nn's part is played by a stand-in (`cudnn_stand_in`), on a GPU as far as jflash knows; `test_cudnn_on_gpu` asks the
same of cuDNN, and `test_cudnn_lowering` what jax.nn makes of the calls.
"""

import functools
from collections.abc import Callable
from typing import Any

import cases
import cudnn_cases
import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case
from cudnn_cases import constant_lse, of_output
from equations import equations
from h200 import H200
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from on_hardware import with_nan_in_padding
from short_run import cover

import jflash
from jflash import _autodiff, _canonical, _dispatch, _platform
from jflash._backends import cudnn
from jflash._platform import Platform

B200 = Platform("gpu", "NVIDIA B200", "10.0", 148)
A100 = Platform("gpu", "NVIDIA A100", "8.0", 108)
P = PartitionSpec


@pytest.fixture(autouse=True)
def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is a Blackwell, as far as jflash knows."""
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": B200})
    monkeypatch.setattr(cudnn, "_attention", cudnn_stand_in.dot_product_attention)


attention = functools.partial(jflash.attention, implementation="cudnn")


CASES = [
    *(Case(**row) for row in cases.product(cudnn_cases.SMALL, 2)),
    *cudnn_cases.windows("bfloat16", 40, 64, 8, (0, 10)),
]


IN_SHORT_RUN = cases.once(CASES)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_SHORT_RUN else cover(0)) for case in CASES], ids=str
)
def test_exact(case: Case):
    """Padding holds NaN, which must reach nothing."""
    call = of_output(cases.build(case))
    oracle.assert_right(oracle.run(constant_lse(attention), with_nan_in_padding(call)), call)


@pytest.mark.parametrize("lengths", [None, "both"])
def test_gradient_of_log_sum_exp(lengths: str | None):
    """jflash has this gradient, and jax.nn has not."""
    call = cases.build(Case("bfloat16", 40, 64, (4, 2), (64, 64), (3,), causal=True, lengths=lengths))
    oracle.assert_right(oracle.run(attention, with_nan_in_padding(call)), call)


def test_tangents():
    call = cases.build(Case("bfloat16", 40, 64, (4, 2), (64, 64), (3,), causal=True, lengths="both"))
    along = oracle.draw_tangents(call)
    oracle.assert_tangents_right(oracle.run_tangents(attention, call, along), call, along)


def test_second_derivative():
    """Through the log-sum-exp too, which the gradient is computed from: as right as that of plain attention is."""
    numbers = np.random.default_rng(0)
    arrays = [numbers.standard_normal((1, 8, 2, 8)) for _ in range(4)]

    def penalty(query: Any, key: Any, value: Any, d_out: Any, implementation: str) -> Any:
        def scalar(*arrays: Any) -> Any:
            out = jflash.attention(*arrays, is_causal=True, implementation=implementation)
            return (out * d_out).astype(jnp.promote_types(out.dtype, jnp.float32)).sum()

        gradients = jax.grad(scalar, (0, 1, 2))(query, key, value)
        return sum((g.astype(jnp.promote_types(g.dtype, jnp.float32)) ** 2).sum() for g in gradients)

    def second(dtype: Any, implementation: str) -> list[np.ndarray]:
        function = jax.jit(jax.grad(functools.partial(penalty, implementation=implementation), (0, 1, 2)))
        return [np.asarray(g, np.float64) for g in function(*(jnp.asarray(array, dtype) for array in arrays))]

    with jax.enable_x64(True):
        rounded = [np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for array in arrays]
        arrays = rounded
        truth = second(jnp.float64, "reference")
    for got, plain, exact in zip(second(jnp.bfloat16, "cudnn"), second(jnp.bfloat16, "reference"), truth, strict=True):
        error, allowed = (np.max(np.abs(found - exact)) for found in (got, plain))
        assert error <= 2 * allowed + float(jnp.finfo(jnp.bfloat16).eps) * np.max(np.abs(exact))


def gradient(attention: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: attention(*arrays).astype(jnp.float32).sum(), (0, 1, 2))


def layers(attention: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, key, value: jax.lax.scan(lambda x, _: (attention(x, key, value), None), query, length=2)[0]


def sharded(attention: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(attention, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


IN_TRAINING: dict[str, Callable[..., Any]] = {
    "grad": gradient,
    "jit": lambda attention: gradient(jax.jit(attention)),
    "scan": lambda attention: gradient(layers(attention)),
    "scan of checkpoints": lambda attention: gradient(layers(jax.checkpoint(attention))),
    "checkpoint": lambda attention: gradient(jax.checkpoint(attention)),
    "vmap of grad": lambda attention: jax.vmap(gradient(attention)),
    "grad of vmap": lambda attention: gradient(jax.vmap(attention)),
    "shard_map": lambda attention: gradient(sharded(attention)),
    "grad in shard_map": lambda attention: sharded(gradient(attention)),
}


@pytest.mark.parametrize("transform", IN_TRAINING)
def test_backward_is_its_own_in_training(transform: str):
    """Under every transform JAX knows that the log-sum-exp is not used."""
    shape = (2, 2, 8, 2, 8) if "vmap" in transform else (2, 8, 2, 8)
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(IN_TRAINING[transform](attention))(array, array, array).jaxpr
    operations = [each.params["operation"] for each in equations(jaxpr) if each.primitive.name == "jflash"]
    backwards = [operation for operation in operations if isinstance(operation, _autodiff._Backward)]
    assert backwards
    assert not any(operation.spec.lse_has_cotangent for operation in backwards)


@pytest.mark.parametrize("split", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_split_over_devices(split: PartitionSpec):
    call = of_output(cases.build(Case("bfloat16", 40, 64, (8, 4), (8, 8), (4,), causal=True, lengths="both")))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def over_devices(**operands: Any) -> Any:
        for name in ("query", "key", "value"):
            operands[name] = jax.lax.with_sharding_constraint(operands[name], NamedSharding(mesh, split))
        return constant_lse(attention)(**operands)

    oracle.assert_right(oracle.run(over_devices, call), call)


def test_split_sequences_are_served_by_the_next():
    """What a sharded `jit` does with the sequences is known when the choice is long made."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    call = cases.build(Case("bfloat16", 40, 64, (2, 1), (8, 8), (2,), causal=True))
    sharding = NamedSharding(mesh, P(None, "x"))

    def over_devices(**operands: Any) -> Any:
        operands |= {name: jax.lax.with_sharding_constraint(operands[name], sharding) for name in ("query", "key")}
        return jflash.attention(**operands, implementation=("cudnn", "xla"))

    oracle.assert_right(oracle.run(over_devices, call), call)
    array = jax.ShapeDtypeStruct((2, 40, 2, 8), jnp.bfloat16, sharding=sharding)
    said = jflash.explain(array, array, array, is_causal=True, implementation=("cudnn", "xla")).splitlines()
    assert said[0].startswith("cudnn serves")
    assert said[1].startswith("sequences: ")
    assert said[1].endswith("; by xla")
    assert said[2] == "  cudnn: it takes whole sequences, and these are split over devices."
    with pytest.raises(jax.errors.JaxRuntimeError, match="it takes whole sequences"):
        jax.jit(attention).lower(array, array, array).compile()


WHOLE = dict(query=(2, 8, 2, 8), key=(2, 8, 1, 8), value=(2, 8, 1, 8))
POSITIVE = "it gives NaN where it hides keys with a `scale` that is not positive."
REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(dtype=jnp.float32), "it takes bfloat16 and float16. Got float32."),
    (dict(scale=jnp.float32(0.5)), "it has no `scale` that is traced."),
    (
        dict(mask=np.ones((8, 8), bool)),
        "it has no `mask`: it gives the mean of all values to a query that sees no key.",
    ),
    (
        dict(bias=np.zeros((8, 8), jnp.bfloat16)),
        "it has no `bias`: it takes one of -2.4e38 or less for -inf, and hides a key that has it.",
    ),
    (dict(alibi_slopes=np.ones(2, np.float32)), "it has no `alibi_slopes`."),
    (dict(sinks=np.ones(2, np.float32)), "it has no `sinks`."),
    (dict(segment_ids=np.zeros((2, 8), np.int32)), "it has no `segment_ids`."),
    (dict(logits_soft_cap=2.0), "it has no `logits_soft_cap`."),
    (dict(score_mod=lambda logit, *_: logit * 2), "it has no `score_mod`."),
    (dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "it has no `dropout_rate`."),
    (
        dict(deterministic=True),
        "it adds up dQ in any order, and deterministic=True asks for the same bits on every run.",
    ),
    (dict(scale=0), f"{POSITIVE} Got 0.0."),
    (dict(scale=-0.3), f"{POSITIVE} Got -0.3."),
    (
        dict(is_causal=True, query_offset=1),
        "its causal mask and its window begin at the top left: a `query_offset` other than 0 needs another.",
    ),
    (
        dict(is_causal=True, query_offset=jnp.int32(0)),
        "its causal mask and its window begin at the top left: a `query_offset` other than 0 needs another.",
    ),
    (dict(local_window_size=(3, 2)), "its windows end at the query. Got 2 keys to the right."),
    (
        dict(query=(2, 10, 2, 8), local_window_size=(3, 0)),
        "its windows need as many keys as queries, or more. Got T=10 and S=8.",
    ),
    (
        dict(local_window_size=(3, 0), key_value_seq_lengths=np.array([8, 5])),
        "it has no window beside `key_value_seq_lengths`: a query may see no key.",
    ),
    (dict(value=(2, 8, 1, 16)), "H and D must be one multiple of 8. Got H=8 and D=16."),
    (
        dict(query=(2, 8, 2, 12), key=(2, 8, 1, 12), value=(2, 8, 1, 12)),
        "H and D must be one multiple of 8. Got H=12 and D=12.",
    ),
    (
        dict(query=(2, 8, 2, 136), key=(2, 8, 1, 136), value=(2, 8, 1, 136)),
        "H must be at most 128 on gpu (NVIDIA B200). Got H=136.",
    ),
    (dict(query=(2, 7, 2, 8)), "jax.nn differentiates it where T and S are even. Got T=7 and S=8."),
    (dict(key=(2, 7, 1, 8), value=(2, 7, 1, 8)), "jax.nn differentiates it where T and S are even. Got T=8 and S=7."),
]


def explain(dtype: Any = jnp.bfloat16, implementation: Any = "cudnn", **options: Any) -> list[str]:
    shapes = {name: options.pop(name, shape) for name, shape in WHOLE.items()}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return jflash.explain(**arrays, implementation=implementation, **options).splitlines()


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refusals(call: dict[str, Any], sentence: str):
    assert explain(**call)[:2] == [
        "No implementation can serve this call on gpu (NVIDIA B200).",
        f"  cudnn: {sentence}",
    ]


@pytest.mark.parametrize(
    "call",
    [
        dict(is_causal=True),
        dict(local_window_size=(3, 0)),
        dict(local_window_size=(3, 2), is_causal=True),
        dict(query_offset=3),
        dict(query=(2, 10, 2, 8), is_causal=True),
        dict(query_seq_lengths=np.array([8, 5]), local_window_size=(3, 0)),
        dict(precision="highest"),
        dict(scale=0.5),
    ],
    ids=str,
)
def test_served_by_default(call: dict[str, Any]):
    assert explain(**call, implementation=None)[0].startswith("cudnn serves")


def test_order():
    """Before the kernels by `mma.sync` on Blackwell, after all kernels elsewhere, and where it was named by name."""
    array = np.zeros((1, 4, 1, 8), np.float32)
    kernels, spec = ("mosaic_gpu", "mosaic_gpu_mma"), _canonical.canonicalize(array, array, array)[0]
    for platform in (B200, Platform("gpu", "NVIDIA B300", "10.3", 148)):
        assert _dispatch.in_order(spec, None, platform) == ("mosaic_gpu", "cudnn", "mosaic_gpu_mma", "xla", "reference")
        assert _dispatch.in_order(spec, kernels, platform) == kernels
    for platform in (H200, A100, Platform("gpu", "NVIDIA RTX 5090", "12.0", 170), Platform("cpu", "cpu", None)):
        assert _dispatch.in_order(spec, None, platform) == (*kernels, "cudnn", "xla", "reference")


def test_machines(monkeypatch: pytest.MonkeyPatch):
    needs = "it needs an NVIDIA GPU since Ampere (compute capability 8.0 or newer), and this is"
    for platform, said in (
        (Platform("cpu", "cpu", None), "cpu."),
        (Platform("gpu", "NVIDIA V100", "7.0", 80), "gpu (NVIDIA V100)."),
        (Platform("gpu", "AMD Instinct MI300", "gfx942", 304), "gpu (AMD Instinct MI300)."),
    ):
        monkeypatch.setattr(_platform, "lowering_targets", lambda _, platform=platform: {"cpu": platform})
        assert explain()[1] == f"  cudnn: {needs} {said}"
    for platform in (H200, A100):
        monkeypatch.setattr(_platform, "lowering_targets", lambda _, platform=platform: {"cpu": platform})
        assert explain()[0].startswith("cudnn serves")


def test_wide_heads_on_hopper(monkeypatch: pytest.MonkeyPatch):
    """jax.nn asks JAX's default device, whatever the call is for."""
    wide = {name: (*shape[:3], 256) for name, shape in WHOLE.items()}
    monkeypatch.setattr(_platform, "lowering_targets", lambda _: {"cpu": H200})
    assert explain(**wide)[1] == "  cudnn: H must be at most 128 on gpu (NVIDIA H200). Got H=256."
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert explain(**wide)[0].startswith("cudnn serves")
    wider = {name: (*shape[:3], 264) for name, shape in WHOLE.items()}
    assert explain(**wider)[1] == "  cudnn: H must be at most 256 on gpu (NVIDIA H200). Got H=264."


def test_explain_says_whose_derivatives():
    last = lambda **options: explain(**options, verbose=True)[-1]
    assert last() == "derivatives: tangent by xla, backward by cudnn, all others by xla"
    assert last(return_residual=True) == (
        "derivatives: tangent by xla, backward by xla (cudnn: it has no gradient of the log-sum-exp), all others by xla"
    )


def test_other_residuals_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """A future jax.nn may keep something else for its backward."""
    monkeypatch.setattr(cudnn, "_attention", lambda query, key, value, **_: query * 2)
    array = jnp.ones((1, 8, 1, 24), jnp.bfloat16)
    with pytest.raises(RuntimeError, match="keeps other residuals"):
        attention(array, array, array)
