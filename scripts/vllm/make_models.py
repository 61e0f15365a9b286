"""Random models of every family in sizes that vLLM's CPU kernels take, for scripts/vllm/check.py."""

import sys
from pathlib import Path

import torch
import transformers as t

COMMON = dict(
    vocab_size=288, hidden_size=256, intermediate_size=192, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1,
    eos_token_id=2, pad_token_id=2,
)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}

MODELS = {
    "llama": lambda: t.LlamaConfig(**COMMON, head_dim=64, attention_bias=True, tie_word_embeddings=True),
    "llama3": lambda: t.LlamaConfig(**COMMON, head_dim=64, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "mistral": lambda: t.MistralConfig(**COMMON, head_dim=32, sliding_window=None, tie_word_embeddings=False),
    "qwen2": lambda: t.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2-own-shape": lambda: t.Qwen2Config(**COMMON, tie_word_embeddings=False),
    "qwen3": lambda: t.Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "gemma2": lambda: t.Gemma2Config(
        **COMMON, head_dim=64, query_pre_attn_scalar=96, sliding_window=128,
        attn_logit_softcapping=20.0, final_logit_softcapping=10.0,
    ),
    "stablelm": lambda: t.StableLmConfig(
        **{**COMMON, "num_attention_heads": 8, "num_key_value_heads": 4}, use_qkv_bias=True,
        tie_word_embeddings=False,
    ),
}

HALVES = ["--ls", "0.5", "--es", "0.5"]
SHRINK = dict.fromkeys(MODELS, HALVES) | {
    # Its width stays; layers, heads and channels go.
    "gemma2": ["--ls", "0.5", "--mlp", "0.5"],
    # Half the heads with half the width is a shape that the family's own architecture carries.
    "qwen2-own-shape": [*HALVES, "--heads", "0.5"],
    # A random model bears little before its draft is never right.
    "speculative": ["--mlp", "0.9"],
    "trimmed": ["--mlp", "0.9", "--vocab", "10"],
}
"""What da-build is asked for."""


def make(name, folder):
    torch.manual_seed(sorted(MODELS).index(name))
    config = MODELS[name]()
    model = t.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            gain = "norm" in key and key.endswith("weight")
            mean = 1.0 if gain and config.model_type != "gemma2" else 0.0
            parameter.copy_(mean + 0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)


if __name__ == "__main__":
    for name in MODELS:
        make(name, Path(sys.argv[1]) / name)
