"""The bench's peers in torch, FlashAttention-4 among them: what they are asked for, and how they are timed.

Modules of the test stand in for torch and for packages whose kernels need a GPU. They compute nothing.
They say what they were asked for, in jflash's words.
"""

import contextlib
import dataclasses
import importlib.machinery
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler
from short_run import cover

from jflash import _platform
from jflash.bench import cases, clocks, mask_mods, measure, peers, score_mods

pytestmark = cover(0)

FLASH = peers.PEERS["FlashAttention-4"]
CASES = cases.Grid((64,), (64,), ("16",), ("full", "causal"), tokens=64, dtype="bfloat16", features=()).cases()


@dataclasses.dataclass
class Tensor:
    """The part of a tensor that the peers need."""

    array: jax.Array

    @property
    def nbytes(self):
        return self.array.nbytes

    @property
    def device(self):
        return "cuda"

    @property
    def shape(self):
        return self.array.shape

    def requires_grad_(self):
        return self

    def __getitem__(self, index):
        return self.array[index]

    def __mul__(self, other):
        return self.array * other

    def contiguous(self):
        return self


@dataclasses.dataclass
class Dual(Tensor):
    """A tensor that moves."""

    tangent: Tensor


FORWARD_MODE = dict(
    dual_level=contextlib.nullcontext,
    make_dual=lambda tensor, tangent: Dual(tensor.array, tangent),
    unpack_dual=lambda dual: (Tensor(dual.array), dual.tangent),
)
"""The part of torch.autograd.forward_ad that the peers need."""


class StandIn:
    """Modules in the place of torch and other packages, and what was asked of them."""

    def __init__(self):
        self.log: list[str] = []
        self.asked: list[dict] = []
        """The arguments of each call, by their names in `jflash.attention` and in its layout."""
        self.differentiated: list[list[Tensor]] = []
        self.compiled: list[types.CodeType] = []

    def modules(self):
        named = lambda name, **members: self._module(name, members)
        functional = types.SimpleNamespace(scaled_dot_product_attention=self.scaled_dot_product_attention)
        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            synchronize=lambda: self.log.append("synchronize"),
            reset_peak_memory_stats=lambda: None,
            memory_allocated=lambda: 0,
            max_memory_allocated=lambda: 3 * clocks.MIB,
            Event=self.event,
            _sleep=lambda cycles: self.log.append("sleep"),
        )
        torch = dict(
            compile=self.compile,
            # As jax.numpy's, under the same names.
            **{name: getattr(jnp, name) for name in ("abs", "clip", "tanh")},
            set_num_threads=lambda number: None,
            from_dlpack=Tensor,
            autograd=types.SimpleNamespace(grad=self.grad),
            nn=types.SimpleNamespace(functional=functional),
            cuda=cuda,
        )
        flex = dict(flex_attention=self.flex_attention, create_block_mask=self.create_block_mask)
        return [
            named("torch", **torch, __path__=[]),
            named("torch.nn", functional=functional, __path__=[]),
            named("torch.nn.attention", __path__=[]),
            named("torch.nn.attention.flex_attention", **flex),
            named("torch.autograd", __path__=[]),
            named("torch.autograd.forward_ad", **FORWARD_MODE),
            named("jvp_flash_attention", __path__=[]),
            named("jvp_flash_attention.jvp_attention", JVPAttn=types.SimpleNamespace(fwd_dual=self.fwd_dual)),
            named("flash_attn", __path__=[]),
            named("flash_attn.cute", flash_attn_func=self.flash_attn_func),
        ]

    def compile(self, function, *, fullgraph, dynamic):
        assert fullgraph
        assert not dynamic
        self.compiled.append(function.__code__)
        return function

    def flex_attention(self, query, key, value, *, score_mod=None, block_mask=None, enable_gqa=False):
        """Attend as torch's flex_attention does: heads before tokens, and a mask of blocks."""
        arrays = {name: tensor.array.swapaxes(1, 2) for name, tensor in dict(query=query, key=key, value=value).items()}
        assert enable_gqa == (arrays["query"].shape[2] != arrays["key"].shape[2])
        shown, by_entry = (None, False) if block_mask is None else block_mask
        options = dict(is_causal=shown is not None and not by_entry)
        if options["is_causal"]:
            queries, keys = np.indices((query.shape[2], key.shape[2]))
            np.testing.assert_array_equal(shown, queries >= keys)
        elif by_entry:
            options["mask_mod"] = shown
        if score_mod is not None:
            options["score_mod"] = score_mod
        return self.out(arrays | options, heads_first=True)

    @staticmethod
    def create_block_mask(function, batch, heads, queries, keys, device):
        """Return all pairs of each batch entry, or of one, and whether entries are told apart."""
        assert (heads, device) == (None, "cuda")
        if batch is None:
            return function(0, 0, *np.indices((queries, keys))), False
        entries, queries, keys = np.indices((batch, queries, keys))
        return function(entries, 0, queries, keys), True

    def flash_attn_func(
        self, q, k, v, *, causal=False, window_size=(None, None), softcap=0.0, learnable_sink=None, **unknown
    ):
        """Attend as flash_attn.cute's function does: it returns both the output and the log-sum-exp."""
        assert not unknown
        options = dict(is_causal=causal) | (dict(logits_soft_cap=softcap) if softcap else {})
        options |= dict(local_window_size=window_size) if window_size != (None, None) else {}
        options |= {} if learnable_sink is None else dict(sinks=learnable_sink.array)
        return self.out(dict(query=q.array, key=k.array, value=v.array, **options)), "log-sum-exp"

    def scaled_dot_product_attention(
        self, query, key, value, *, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False
    ):
        """Attend as torch's function does: heads before tokens."""
        arrays = {name: tensor.array.swapaxes(1, 2) for name, tensor in dict(query=query, key=key, value=value).items()}
        assert enable_gqa == (arrays["query"].shape[2] != arrays["key"].shape[2])
        options = dict(is_causal=is_causal)
        if attn_mask is not None:
            options["mask" if attn_mask.array.dtype == bool else "bias"] = attn_mask.array
        if dropout_p:
            options["dropout_rate"] = dropout_p
        return self.out(arrays | options, heads_first=True)

    def fwd_dual(self, q, k, v, *, causal=False):
        """Attend as jvp_flash_attention's function does: heads before tokens, and tensors that may move."""
        tensors = dict(query=q, key=k, value=v)
        moving = {isinstance(tensor, Dual) for tensor in tensors.values()}
        assert len(moving) == 1
        arrays = {name: tensor.array.swapaxes(1, 2) for name, tensor in tensors.items()}
        out = self.out(arrays | dict(is_causal=causal), heads_first=True)
        return Dual(out.array, out) if moving == {True} else out

    def out(self, asked, heads_first=False):
        self.log.append("call")
        self.asked.append(asked)
        out = jnp.zeros((*asked["query"].shape[:-1], asked["value"].shape[-1]))
        return Tensor(out.swapaxes(1, 2) if heads_first else out)

    def grad(self, out, variable, cotangent):
        assert cotangent.array.shape == out.array.shape
        self.differentiated.append(variable)

    def event(self, enable_timing):
        assert enable_timing
        record = lambda: self.log.append("record")
        return types.SimpleNamespace(record=record, elapsed_time=lambda stop: 0.25)

    @staticmethod
    def _module(name, members):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for member, value in members.items():
            setattr(module, member, value)
        return module


@pytest.fixture
def stand_in(monkeypatch):
    """Put a stand-in for both modules in place, on what is taken for an NVIDIA GPU."""
    found = StandIn()
    for module in found.modules():
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def kernel_times(compiled, aggregate, iterations):
        return lambda *arrays: (compiled(*arrays), [0.5] * iterations)

    monkeypatch.setattr(profiler, "measure", kernel_times)
    monkeypatch.setattr(clocks, "on_nvidia", lambda: True)
    return found


def measured(some_cases, names):
    return measure.measure(some_cases, names, backward=True, rounds=1, step=lambda *_: None)


def refusal(peer, case):
    return peer.refuses(case, [*cases.data(case).arguments, *cases.options(case)])


def modified_logits(score_mod):
    """Return what a score_mod makes of the logits of four heads."""
    head, query, key = jnp.meshgrid(*map(jnp.arange, (4, 40, 400)), indexing="ij")
    return score_mod(jnp.sin(1.0 * key) * 60, 0, head, query, key)


@pytest.mark.parametrize("name", ["torch", "flex_attention", "FlashAttention-4", "jvp_flash_attention"])
def test_peers_are_asked_for_the_attention_of_the_case(name, stand_in):
    peer = peers.PEERS[name]
    accepted = [case for case in CASES if refusal(peer, case) is None]
    assert len(accepted) >= 10
    for case in accepted:
        data = cases.data(case)
        expected = dict(is_causal=False) | data.arguments | cases.options(case)
        if case.score_mod is not None:
            own = score_mods.bound(case.score_mod, jnp, data.captured)
            expected |= dict(logits_soft_cap=50.0) if name == "FlashAttention-4" else dict(score_mod=own)
        if case.mask_mod is not None:
            entries, queries, keys = np.indices((case.batch, case.queries, case.keys))
            expected["mask_mod"] = mask_mods.bound(case.mask_mod, data.captured)(entries, 0, queries, keys)
        # torch draws from a state of its own.
        expected.pop("dropout_key", None)
        for work in ("fwd", "fwd+bwd"):
            stand_in.differentiated.clear()
            peer.prepare(case, work, data)
            asked = stand_in.asked[-1]
            assert asked.keys() == expected.keys()
            for argument, value in expected.items():
                if argument == "score_mod":
                    np.testing.assert_array_equal(modified_logits(asked["score_mod"]), modified_logits(value))
                    continue
                np.testing.assert_array_equal(asked[argument], value, strict=isinstance(value, jax.Array))
            variables = [argument for argument in data.arguments | data.captured if argument in cases.DIFFERENTIATED]
            assert {len(tensors) for tensors in stand_in.differentiated} == (
                {len(variables)} if work != "fwd" else set()
            )


def lacking(peer):
    return {case.name: refusal(peer, case) for case in CASES if refusal(peer, case) is not None}


def test_flex_attention_has_what_a_score_mod_needs(stand_in):
    """flex_attention is asked for nothing else among the options. Each case is compiled by itself."""
    flex = peers.PEERS["flex_attention"]
    assert flex.missing(_platform.current()) is None
    taken = {case.name for case in CASES} - lacking(flex).keys()
    assert {case.name for case in CASES if case.score_mod is not None or case.mask_mod is not None} <= taken
    assert {"full", "causal, grouped heads", "decoding, latent, keys of 576, values of 512"} <= taken
    assert {"bias per pair", "causal, window", "causal, sinks", "dropout of 0.1"} <= lacking(flex).keys()
    # torch has a limit of compilations for one function.
    stand_in.compiled.clear()
    for case in CASES[:2]:
        flex.prepare(case, "fwd", cases.data(case))
    first, second = stand_in.compiled
    assert first is not second
    assert refusal(peers.PEERS["torch"], dataclasses.replace(CASES[0], score_mod="relative")) == (
        "It has no argument score_mod."
    )


def test_flash_attention_4_says_which_options_it_lacks():
    assert lacking(FLASH) == {
        "bias per pair": "It has no argument bias.",
        "bias per key": "It has no argument bias.",
        "mask per pair": "It has no argument mask.",
        "causal, ALiBi": "It has no argument alibi_slopes.",
        "causal, score_mod: per head": "It has no argument score_mod.",
        "score_mod: scalar": "It has no argument score_mod.",
        "score_mod: relative": "It has no argument score_mod.",
        "dropout of 0.1": "It has no argument dropout_key, dropout_rate.",
        **{f"mask_mod: {name}": "It has no argument mask_mod." for name in mask_mods.MASK_MODS},
        "causal, 8 packed segments": "It has no argument segment_ids.",
        "half is padding": "It has no argument query_seq_lengths, key_value_seq_lengths.",
    }
    wide = dataclasses.replace(CASES[0], dtype="float32")
    assert refusal(FLASH, wide) == "It takes bfloat16 and float16, not float32."


def test_forward_mode_moves_every_operand(stand_in):
    """A peer without such kernels says so."""
    peer = peers.PEERS["jvp_flash_attention"]
    assert peer.missing(_platform.current()) is None
    grouped = dataclasses.replace(CASES[0], heads=4, key_heads=2)
    assert refusal(peer, grouped) == "It wants as many key heads as query heads."
    for case in (case for case in CASES if refusal(peer, case) is None):
        data = cases.data(case)
        peer.prepare(case, "jvp", data)
        expected = dict(is_causal=False) | data.arguments | cases.options(case)
        assert stand_in.asked[-1].keys() == expected.keys()
        for argument, value in expected.items():
            np.testing.assert_array_equal(stand_in.asked[-1][argument], value)
    with pytest.raises(NotImplementedError, match="no kernels for forward mode"):
        FLASH.prepare(CASES[0], "jvp", cases.data(CASES[0]))


def test_calls_are_queued_while_the_gpu_is_kept_waiting(stand_in):
    """The time that Python takes for a launch is not the kernel's."""
    sample = FLASH.prepare(CASES[0], "fwd", cases.data(CASES[0])).sample
    stand_in.log.clear()
    assert sample() == [0.25] * clocks.ITERATIONS
    warm_up, counted = ["call"] * clocks.WARM_UP, ["record", "call", "record"] * clocks.ITERATIONS
    assert stand_in.log == ["sleep", *warm_up, *counted, "synchronize"]


def test_flash_attention_4_has_its_rows_beside_jflash(stand_in):
    found = measured(CASES[:1], ["jflash", "FlashAttention-4"])
    assert found.about.missing == {}
    assert {"flash-attn-4", "nvidia-cutlass-dsl", "torch"} <= found.about.versions.keys()
    rows = {(row.peer, row.work): row.figures for row in found.rows}
    assert {peer: rows[peer, "fwd"].ms for peer in ("jflash", "FlashAttention-4")} == {
        "jflash": 0.5,
        "FlashAttention-4": 0.25,
    }
    assert rows["FlashAttention-4", "bwd"].ms == 0
    assert rows["FlashAttention-4", "fwd"].temporary_mib == 3


def test_an_error_of_flash_attention_4_is_recorded_in_its_words(stand_in, monkeypatch):
    def refuse(**_):
        raise AssertionError("Heads of 16 are not supported.\nSecond line.")

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", refuse)
    rows = measured(CASES[:1], ["FlashAttention-4"]).rows
    assert {row.figures.refusal for row in rows} == {"AssertionError: Heads of 16 are not supported."}


def test_why_flash_attention_4_is_missing(stand_in, monkeypatch):
    here = _platform.current()
    assert FLASH.missing(here) is None
    for module in ("no_such_package", "no_such_package.cute", "flash_attn.no_such_module"):
        assert dataclasses.replace(FLASH, module=module).missing(here) == "flash-attn-4 is not installed."

    def load():
        raise ModuleNotFoundError("No module named 'cutlass'")

    broken = dataclasses.replace(FLASH, load=load)
    assert broken.missing(here) == "flash-attn-4 cannot be imported: No module named 'cutlass'"
    monkeypatch.setattr(clocks, "on_nvidia", lambda: False)
    assert broken.missing(here) == f"It needs an NVIDIA GPU, and this is {here}."
