"""Makes tiny random models of every family but plain Llama, with the logits of transformers.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors gguf
    venv/bin/python tests/golden/make_tiny_families.py

Deterministic, with weights as in make_tiny_llama.py. Each folder `tiny_<family>/` holds config.json,
model.safetensors in f16, a tokenizer, the expected logits, and `tiny.gguf` in llama.cpp's form where
llama.cpp stores the family differently from Llama. Settings are chosen so that leaving any one of a
family's peculiarities out changes the logits.
"""

import shutil

import gguf
import numpy as np
import safetensors.torch
import torch
import transformers
from make_tiny_llama import HERE, TOKENS, rounded, write_json

COMMON = dict(
    vocab_size=288, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
    eos_token_id=2, pad_token_id=2, attn_implementation="eager",
)
FULL, SLIDING = "full_attention", "sliding_attention"


def family(name):
    t = transformers
    if name == "llama_bias":
        return t.LlamaConfig(
            **COMMON, head_dim=16, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True,
            tie_word_embeddings=False,
        )
    if name == "mistral":
        return t.MistralConfig(
            **COMMON, head_dim=24, rms_norm_eps=1e-5, sliding_window=4, tie_word_embeddings=False,
        )
    if name == "qwen2":
        return t.Qwen2Config(**COMMON, rms_norm_eps=1e-6, tie_word_embeddings=True)
    if name == "qwen3":
        return t.Qwen3Config(
            **COMMON, head_dim=16, rms_norm_eps=1e-2, tie_word_embeddings=True,
        )
    if name == "gemma2":
        return t.Gemma2Config(
            **COMMON, head_dim=16, rms_norm_eps=1e-6, query_pre_attn_scalar=40, sliding_window=4,
            attn_logit_softcapping=2.0, final_logit_softcapping=8.0,
            hidden_activation="gelu_pytorch_tanh", layer_types=[SLIDING, FULL],
        )
    if name == "stablelm":
        settings = {**COMMON, "hidden_size": 64}
        return t.StableLmConfig(
            **settings, layer_norm_eps=1e-5, use_qkv_bias=True, tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            },
        )
    raise ValueError(name)


def make_model(config, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    offset_gain = config.model_type == "gemma2"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = 0.0, 0.25
            if "norm" in name and name.endswith("weight"):
                mean, spread = (-0.2 if offset_gain else 0.7), 0.1
            parameter.copy_(rounded(parameter, generator, mean, spread))
    return model


def save(folder, model):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = model.config
    state = {name: t.to(torch.float16).contiguous() for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    document = config.to_dict()
    for key in ("_name_or_path", "id2label", "label2id", "problem_type"):
        document.pop(key, None)
    document["architectures"] = [type(model).__name__]
    document["dtype"] = "float16"
    write_json(folder / "config.json", document)
    shutil.copy(HERE / "tiny_llama" / "tokenizer.json", folder / "tokenizer.json")
    save_expected(folder / "expected.safetensors", model)


def save_expected(path, model):
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    tensors = {"logits": logits.contiguous(), "tokens": torch.tensor(TOKENS, dtype=torch.int32)}
    safetensors.torch.save_file(tensors, path)


ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "stablelm": gguf.MODEL_ARCH.STABLELM,
}


def save_gguf(path, model):
    """As llama.cpp's converter writes these families: its names, gains of Gemma with their 1."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "stablelm":
        writer.add_rope_dimension_count(head_dim // 4)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(False)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type != "gemma2":
        writer.add_rope_freq_base(10000.0)
    else:
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    document = __import__("json").loads((HERE / "tiny_llama" / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    special = {token["content"] for token in document["added_tokens"]}
    pieces = sorted(vocabulary, key=vocabulary.get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece in special else 1 for piece in pieces])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if config.model_type == "gemma2" and name.endswith("norm.weight"):
            values = values + 1
        values = np.ascontiguousarray(values)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    for seed, name in enumerate(
        ["llama_bias", "mistral", "qwen2", "qwen3", "gemma2", "stablelm"], start=11
    ):
        model = make_model(family(name), seed)
        folder = HERE / f"tiny_{name}"
        save(folder, model)
        if model.config.model_type in ARCHITECTURES:
            save_gguf(folder / "tiny.gguf", model)
        if name == "gemma2":
            # GGUF has no key for this scalar, and llama.cpp takes the head size.
            config = family(name)
            config.query_pre_attn_scalar = config.head_dim
            save_expected(folder / "expected_gguf.safetensors", make_model(config, seed))
        for path in folder.iterdir():
            path.chmod(0o644)


if __name__ == "__main__":
    main()
