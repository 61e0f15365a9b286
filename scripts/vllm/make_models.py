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

FAMILIES = {
    "llama": lambda: t.LlamaConfig(**COMMON, head_dim=64, attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: t.MistralConfig(**COMMON, head_dim=32, sliding_window=None, tie_word_embeddings=False),
    "qwen2": lambda: t.Qwen2Config(**COMMON, tie_word_embeddings=True),
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


def make(name, folder):
    torch.manual_seed(sorted(FAMILIES).index(name))
    config = FAMILIES[name]()
    model = t.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            gain = "norm" in key and key.endswith("weight")
            mean = 1.0 if gain and config.model_type != "gemma2" else 0.0
            parameter.copy_(mean + 0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)


if __name__ == "__main__":
    for name in FAMILIES:
        make(name, Path(sys.argv[1]) / name)
