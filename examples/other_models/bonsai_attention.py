"""bonsai (Flax nnx): Qwen 3 and Gemma 3 with jflash, which a block of `replacing_jax_nn` does not reach.

    git clone https://github.com/jax-ml/bonsai
    pip install tqdm pillow '.[flax]'
    PYTHONPATH=bonsai python examples/other_models/bonsai_attention.py

bonsai is in no package registry. Both models compute attention by einsums: Qwen 3 in lines of `Attention.__call__`,
Gemma 3, its vision tower too, in a function of the module. ViT and Whisper have Flax's layer, which calls jax.nn unless
it has dropout. The lines below are for your clone; here they change the modules in memory. bonsai's `forward` is under
`jax.jit`, so a model that ran before goes on as it was until `jax.clear_caches()`.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
from bonsai.models.gemma3 import modeling as gemma3
from bonsai.models.qwen3 import modeling as qwen3
from bonsai.models.vit import modeling as vit
from flax import nnx

import jflash

# In Qwen 3's Attention.__call__ logits and probabilities go, from the first of these lines to before the second.
LOGITS = (r" *# GQA reshape", r" *# Masking and Softmax")
PROBABILITIES = (r" *attn_mask = final_mask", r"\n *cache\.cur_ind\.set_value")
# This comes in their place. Padding on the left stays in `final_mask`, which knows where each row begins.
ATTENTION = """\
        qkv = jflash.attention(
            query_proj, cache.k_cache[...], cache.v_cache[...], mask=final_mask[:, None], scale=self.scale
        )
"""
TOKENS = np.concatenate([np.zeros((2, 3), int), np.arange(26).reshape(2, 13) + 1], axis=1)  # 0 is padding
PIXELS = np.random.default_rng(0).standard_normal((2, 8, 8, 3)).astype(np.float32)


def changed(source: str) -> str:
    """Return the text of Qwen 3's class with its attention by jflash."""
    for (first, end), instead in ((LOGITS, ""), (PROBABILITIES, ATTENTION)):
        source, count = re.subn(f"{first}.*?(?={end})", instead, source, count=1, flags=re.DOTALL)
        assert count == 1, "This version of bonsai has other lines."
    return source


def sharded_attention(q, k, v, mask, scale=None, *, attn_logit_sharding, out_sharding):
    """Return each head's output: in the place of Gemma 3's function. Its shardings are those of the arrays."""
    return jflash.attention(q, k, v, mask=mask, scale=scale)


def make_qwen3():
    """Return a tiny Qwen 3, as a function that returns the logits after a prompt and after one token more."""
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=32, emb_dim=16, mlp_dim=32, num_heads=4, head_dim=8, num_kv_heads=2, rope_theta=10_000,
        rope_scaling_factor=1.0, local_rope_theta=1e4, norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    def logits():
        cache = qwen3.init_cache(config, 2, TOKENS.shape[1], 1, dtype=jnp.float32)
        first, cache = qwen3.forward(model, cache, jnp.asarray(TOKENS), 0)
        return jnp.stack([first, qwen3.forward(model, cache, jnp.ones((2, 1), int), 0)[0]])

    return logits


def make_gemma3():
    """Return a tiny Gemma 3, as a function that returns the logits after a text with an image and after one without."""
    layers = [gemma3.AttentionMode.SLIDE, gemma3.AttentionMode.FULL]
    text = gemma3.TextConfig(
        attention_bias=False, attention_dropout=0.0, head_dim=8, hidden_size=16, intermediate_size=32,
        layer_types=layers, max_position_embeddings=64, num_attention_heads=4, num_hidden_layers=2,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_full_factor=1.0, rope_full_theta=1e4, rope_slide_factor=1.0,
        rope_slide_theta=1e4, sliding_window=5, vocab_size=32, norm_dtype=jnp.float32,
    )  # fmt: skip
    vision = gemma3.VisionConfig(
        attention_dropout=0.0, hidden_size=16, image_size=8, intermediate_size=32, layer_norm_eps=1e-6,
        num_attention_heads=2, num_channels=3, num_hidden_layers=2, patch_size=4, vision_use_head=False,
    )  # fmt: skip
    config = gemma3.ModelConfig(vision, text, mm_tokens_per_image=4, dtype="float32", final_logit_softcapping=None)
    model = gemma3.Gemma3Model(config, rngs=nnx.Rngs(0))
    is_image = jnp.arange(16)[None].repeat(2, 0) // 4 == 2
    weights = model.multi_modal_projector.mm_input_projection_weight  # all 0 as it is made
    weights.set_value(jax.random.normal(jax.random.key(1), weights.shape))

    def after(pixels, types):
        cache = gemma3.init_cache(config, 2, 16, 0, dtype=jnp.float32)
        return gemma3.forward(model, cache, jnp.asarray(TOKENS), pixels, jnp.asarray(TOKENS != 0), types)[0]

    return lambda: jnp.stack([after(PIXELS, is_image.astype(int)), after(None, 0 * is_image)])


def run_vit(dropout: float) -> None:
    """Run a tiny ViT, whose layers are Flax's own."""
    config = vit.ModelConfig(
        image_size=(8, 8), patch_size=(4, 4), num_channels=3, hidden_dim=16, attn_dropout_prob=dropout,
        dropout_prob=0.0, num_heads=2, mlp_dim=32, eps=1e-6, num_layers=2, num_labels=3,
    )  # fmt: skip
    model = vit.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    model.eval()
    model(jnp.asarray(PIXELS), rngs=nnx.Rngs(1))


def main() -> None:
    """Compare tiny models before and after the change."""
    before = {"Qwen 3": make_qwen3(), "Gemma 3": make_gemma3()}
    with jflash.replacing_jax_nn() as replaced:
        wanted = {name: logits() for name, logits in before.items()}
        run_vit(dropout=0.1)
        assert replaced.served == 0
        run_vit(dropout=0.0)
        assert replaced.served == 2
    print("ViT:", replaced.report().splitlines()[0])

    exec(changed(inspect.getsource(qwen3.Attention)), vars(qwen3) | {"jflash": jflash}, made := {})
    qwen3.Attention = made["Attention"]
    gemma3.sharded_attention = sharded_attention
    np.testing.assert_array_equal(before["Gemma 3"](), wanted["Gemma 3"])  # the old program
    jax.clear_caches()

    for name, logits in {"Qwen 3": make_qwen3(), "Gemma 3": before["Gemma 3"]}.items():
        assert "jflash" in str(jax.make_jaxpr(logits)())
        difference = float(jnp.abs(logits() - wanted[name]).max())
        assert difference < 1e-5, (name, difference)
        print(f"bonsai's {name}: the same logits to {difference:.0e}")


if __name__ == "__main__":
    main()
