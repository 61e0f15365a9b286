"""Logits of sliced tiny models in float64, by the definition of slicing and not by its formulas.

    venv/bin/python tests/golden/make_sliced.py     # the venv of make_tiny_families.py

A sliced draft computes what its target would if everything that is written into the residual stream
were projected onto the span of the map's directions, and if the layers, heads and channels that are
dropped gave nothing. So the target itself runs here, as transformers implements it, in float64, with
hooks that project and mask: no gain is folded, no epsilon and no width is changed. Each folder gets
sliced.safetensors: `directions` (D, K) orthonormal, `layers`, `groups` and `channels` that are kept
(one row for each kept layer), `tokens`, and `logits` (T, V).
"""

import safetensors.torch
import torch
import transformers
from make_tiny_llama import HERE, TOKENS

KEPT_LAYERS = {"tiny_llama": [0, 2]}
MODELS = [
    "tiny_llama", "tiny_llama_bias", "tiny_mistral", "tiny_qwen2", "tiny_qwen3", "tiny_gemma2",
    "tiny_stablelm",
]


def directions(config, generator):
    """Half of the width; none of the mean where the family's norm takes it off."""
    width = config.hidden_size
    if config.model_type == "gemma2":
        return torch.eye(width, dtype=torch.float64)
    layer_norm = config.model_type == "stablelm"
    random = torch.randn(width, width // 2 - layer_norm, generator=generator, dtype=torch.float64)
    if layer_norm:
        random -= random.mean(0, keepdim=True)
    return torch.linalg.qr(random).Q


def slice_by_hooks(model, q, layers, groups, channels):
    config = model.config
    project = q @ q.T
    heads = config.num_attention_heads // config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    write = lambda module, inputs, output: output @ project
    if config.model_type != "gemma2":
        model.model.embed_tokens.register_forward_hook(write)
    model.model.layers = torch.nn.ModuleList([model.model.layers[at] for at in layers])
    config.num_hidden_layers = len(layers)
    for block, kept_groups, kept_channels in zip(model.model.layers, groups, channels):
        head_mask = torch.zeros(config.num_key_value_heads, heads * head_dim, dtype=torch.float64)
        head_mask[kept_groups] = 1.0
        channel_mask = torch.zeros(config.intermediate_size, dtype=torch.float64)
        channel_mask[kept_channels] = 1.0
        for module, mask in ((block.self_attn.o_proj, head_mask.flatten()), (block.mlp.down_proj, channel_mask)):
            module.register_forward_pre_hook(lambda _, inputs, mask=mask: (inputs[0] * mask,))
            if config.model_type != "gemma2":
                module.register_forward_hook(write)


def main():
    for seed, name in enumerate(MODELS):
        generator = torch.Generator().manual_seed(900 + seed)
        config = transformers.AutoConfig.from_pretrained(HERE / name)
        config._attn_implementation = "eager"
        if config.model_type == "gemma2":
            # A draft whose layers see differently far is given full attention.
            config.sliding_window = 10_000
        # Not loaded in the files' f16 first: Gemma 2 rounds its embedding scale to what it loads in.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / name, config=config, dtype=torch.float64
        ).eval()
        layers = KEPT_LAYERS.get(name, list(range(config.num_hidden_layers)))
        some = lambda count, keep: torch.randperm(count, generator=generator)[:keep].sort().values.tolist()
        groups = [some(config.num_key_value_heads, 1) for _ in layers]
        channels = [some(config.intermediate_size, config.intermediate_size // 2) for _ in layers]
        q = directions(config, generator)
        slice_by_hooks(model, q, layers, groups, channels)
        tokens = torch.tensor(TOKENS)
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0]
        as_ids = lambda rows: torch.tensor(rows, dtype=torch.int32).contiguous()
        safetensors.torch.save_file(
            {
                "directions": q.contiguous(), "layers": as_ids(layers), "groups": as_ids(groups),
                "channels": as_ids(channels), "tokens": as_ids(TOKENS), "logits": logits.float().contiguous(),
            },
            HERE / name / "sliced.safetensors",
        )
        print(name, tuple(q.shape), float(logits.abs().max()))


if __name__ == "__main__":
    main()
