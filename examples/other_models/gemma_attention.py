"""DeepMind's gemma (Flax linen): its attention with jflash, in the lines of `gemma/gm/nn/_modules.py` that compute it.

    pip install gemma '.[flax]'
    python examples/other_models/gemma_attention.py

The model computes attention by einsums, so a block of `replacing_jax_nn` sees no call. The lines below are for your
copy of the package; here they change the class in memory. The model keeps its programs by `flax.linen.jit`, so a model
that ran before goes on as it was until `jax.clear_caches()`.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm
from gemma.gm.nn import _modules

import jflash

# In Attention.__call__ logits and probabilities go, from the first of these lines to the one before the second.
LOGITS = (r"    if self\.use_gqa:\n[^\n]*\n      b, t, kg, h = query_scaled", r"    if self\.attn_type ==")
PROBABILITIES = (r"    # \[[^\n]*\n    padded_logits = ", r"    # \[[^\n]*\n    attn_output = ")
# This comes in their place. The sliding window stays in `attn_mask`, which knows where the cache begins.
ATTENTION = """\
    encoded = jflash.attention(
        query_scaled, key_proj, value_proj,
        mask=attn_mask[:, None].astype(bool),
        scale=1.0,
        logits_soft_cap=self.attn_logits_soft_cap,
    )

"""


def changed(source: str) -> str:
    """Return the text of the class with its attention by jflash."""
    for (first, end), instead in ((LOGITS, ""), (PROBABILITIES, ATTENTION)):
        source, count = re.subn(f"{first}.*?(?={end})", instead, source, count=1, flags=re.DOTALL)
        assert count == 1, "This version of gemma has other lines."
    return source


def main() -> None:
    """Compare a tiny model before and after the change."""
    kinds = [_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL]
    config = gm.nn.config.TransformerConfig(
        num_embed=32, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=8, num_kv_heads=2, final_logit_softcap=None,
        use_post_attn_norm=True, use_post_ffw_norm=True, attention_types=kinds, attn_logits_soft_cap=20.0,
        sliding_window_size=4, use_qk_norm=True,
    )  # fmt: skip
    model, tokens = gm.nn.Transformer(config=config, dtype=jnp.float32), jnp.arange(24).reshape(2, 12) + 1
    with jflash.replacing_jax_nn() as replaced:
        variables = model.init(jax.random.key(0), tokens)
        want = model.apply(variables, tokens).logits
    print(replaced.report())
    assert replaced.served == 0

    exec(changed(inspect.getsource(_modules.Attention)), vars(_modules) | {"jflash": jflash}, made := {})
    _modules.Attention = made["Attention"]
    np.testing.assert_array_equal(model.apply(variables, tokens).logits, want)  # the old program
    jax.clear_caches()

    traced = str(jax.make_jaxpr(lambda: model.apply(variables, tokens).logits)())
    assert traced.count("jflash") > 0
    difference = float(jnp.abs(model.apply(variables, tokens).logits - want).max())
    assert difference < 1e-5, difference
    print(f"gemma: the same logits to {difference:.0e}")


if __name__ == "__main__":
    main()
