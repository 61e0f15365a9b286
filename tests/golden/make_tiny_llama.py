"""Makes the golden files of this folder: tiny random Llamas with the logits that transformers
computes, the same model as llama.cpp would convert it, and two small tokenizers.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors gguf
    venv/bin/python tests/golden/make_tiny_llama.py

Deterministic: the same versions write the same bytes. Weights are multiples of 1/256 below 1, so
that f32, f16 and bf16 hold them exactly and every reader must return the same numbers.

tiny_llama/       untied, f32; tiny_llama.gguf is the same model, bf16 with f32 norms
tiny_llama_tied/  tied, two layers, f16; config_llama3_rope.json is the same weights with another
                  rotary embedding
tokenizers/       byte_fallback.json, a SentencePiece-like tokenizer
chat.json         templates, messages, and the text that transformers makes of them
"""

import json
import pathlib

import gguf
import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent
TOKENS = [1, 17, 42, 99, 200, 287, 3, 3, 128, 64, 250, 7]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "the rain in spain stays mainly in the plain",
    "  two  spaces, tabs\tand\n\nnew lines ",
    "1234 apples cost $5.67, don't they?",
    "<|im_start|>user\nhello<|im_end|>",
    "naïve café — 東京 🦀 e\u0301",
    "",
]
CORPUS = (
    "the rain in spain stays mainly in the plain. she said that they had seen the train. "
    "there is no other time than the time that is there. 12 and 34 make 46. "
) * 8


def rounded(tensor, generator, mean=0.0, spread=0.25):
    values = mean + spread * torch.randn(tensor.shape, generator=generator)
    return (values.clamp(-0.99, 0.99) * 256).round() / 256


def make_model(config, seed):
    generator = torch.Generator().manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = (0.7, 0.1) if "norm" in name else (0.0, 0.25)
            parameter.copy_(rounded(parameter, generator, mean, spread))
    return model


def write_expected(path, model):
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    tensors = {"logits": logits.contiguous(), "tokens": torch.tensor(TOKENS, dtype=torch.int32)}
    safetensors.torch.save_file(tensors, path)


def config(**changes):
    settings = dict(
        vocab_size=288, hidden_size=32, intermediate_size=20, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=2, hidden_act="silu", attn_implementation="eager",
    )
    settings.update(changes)
    return transformers.LlamaConfig(**settings)


def save_model(folder, model, dtype):
    folder.mkdir(exist_ok=True)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder / "config.json", model, dtype)


def write_config(path, model, dtype):
    document = model.config.to_dict()
    for key in ("_name_or_path", "id2label", "label2id", "problem_type"):
        document.pop(key, None)
    document["architectures"] = ["LlamaForCausalLM"]
    document["dtype"] = str(dtype).removeprefix("torch.")
    write_json(path, document)


def write_json(path, document):
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def byte_level_tokenizer():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def save_tokenizer(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 256,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2},
    )
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "the train — 12?"},
    ]
    chat = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    write_json(
        folder / "expected_text.json",
        {
            "texts": [
                {"text": text, "ids": fast.encode(text, add_special_tokens=False)}
                for text in TEXTS
            ],
            "messages": messages,
            "chat": chat,
            "chat_ids": fast.encode(chat, add_special_tokens=False),
        },
    )


def permute(weights, heads):
    """The row order that llama.cpp gives to q and k projections of Llama models."""
    rows = weights.shape[0]
    return (
        weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{PARTS[rest.removesuffix('.weight')]}.weight"


def save_gguf(path, model, tokenizer):
    settings = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_rope_dimension_count(settings.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)
    document = json.loads(tokenizer.to_str())
    pieces = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece in pieces])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if ".q_proj." in name:
            values = permute(values, settings.num_attention_heads)
        if ".k_proj." in name:
            values = permute(values, settings.num_key_value_heads)
        values = np.ascontiguousarray(values)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_fallback_tokenizer():
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁"] + list("abcdefghijklmnopqrstuvwxyz.,é東") + ["▁t", "he", "▁the", "in", "an"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("a", "n")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


CHATS = {
    "plain": CHAT_TEMPLATE,
    "white space": """{% for m in messages %}
    {% if m.role == 'user' %}
  [{{ m.content | trim }}]
    {% elif m['role'] == 'system' %}
  <{{- m.content -}}>
    {% else %}
({{ m.content }})
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
>
{%- endif %}

""",
    "tools": """{{- bos_token }}
{%- if tools is not none and tools %}
{%- for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{{- tool['function'].name }}
{%- endfor %}
{%- else %}
no tools
{%- endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}""",
    "python methods": """{% set ns = namespace(system='', n=0) %}
{% if messages[0].role == 'system' %}
{% set ns.system = messages[0]['content'].strip() %}
{% set rest = messages[1:] %}
{% else %}
{% set rest = messages %}
{% endif %}
{{ ns.system.upper() }}|{{ rest | length }}|{{ messages[-1].content.split(' ')[0] }}
{% for m in rest %}
{% set ns.n = ns.n + 1 %}
{{ loop.index0 }}{{ loop.last }}{{ m.content.startswith('the') }}{{ 'x' in m }}{{ m.get('x', 'none') }}
{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}
{% endfor %}
{{ ns.n }} {{ missing is defined }} {{ missing }} {{ messages[0].content is string }}""",
    "loops": """{% for m in messages if m.role != 'system' %}
{% if m.content == 'stop' %}{% break %}{% endif %}
{% if loop.first %}{% continue %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ m.content }}
{% endfor %}
{{ messages | map(attribute='role') | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | last).role }} {{ range(3) | list | join('-') }} {{ 'a' ~ 1 }} {{ none }} {{ messages[:1] }} {{ [1.0, true, none, "it's", '"\\n'] }} {{ 7 // 2 }} {{ 2 ** 3 }}""",
    "macro": """{% macro line(m, mark='#') %}{{ mark }} {{ m.role | capitalize }}: {{ m.content }}
{% endmacro %}
{% for m in messages %}{{ line(m) }}{{ line(m, mark='-') }}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{{ m.content }}{{ eos_token }}
{%- endgeneration %}
{% else %}
{{ m.content }}
{% endif %}{% endfor %}""",
    "json of everything": """{{ {'a': [1, 2.5, 1e-7, 1e22, true, none], 'ü': 'é"\\n\u0001<&>'} | tojson }}
{{ messages | tojson }}
{{ messages | tojson(indent=4) }}
{{ [] | tojson(indent=2) }}{{ {} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}""",
    "raise": "{{ raise_exception('roles must alternate') }}",
}
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "the train — 12?"},
    {"role": "assistant", "content": "yes\n"},
    {"role": "user", "content": "stop"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's the weather in “Paris” <now> & later",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}},
        },
    }
]


def write_chats(path, folder):
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    cases = []
    for name, template in CHATS.items():
        for tools in [None, TOOLS] if name == "tools" else [None]:
            for prompt in [False, True] if "add_generation_prompt" in template else [False]:
                try:
                    text = fast.apply_chat_template(
                        MESSAGES, tools=tools, chat_template=template, tokenize=False,
                        add_generation_prompt=prompt,
                    )
                except Exception as error:
                    assert name == "raise", (name, error)
                    text = None
                cases.append(
                    {
                        "name": name, "template": template, "tools": tools,
                        "add_generation_prompt": prompt, "expected": text,
                    }
                )
    write_json(path, {"messages": MESSAGES, "cases": cases})


def main():
    untied = make_model(config(), seed=1)
    folder = HERE / "tiny_llama"
    save_model(folder, untied, torch.float32)
    write_expected(folder / "expected.safetensors", untied)
    tokenizer = byte_level_tokenizer()
    save_tokenizer(folder, tokenizer)
    save_gguf(folder / "tiny_llama.gguf", untied, tokenizer)
    write_chats(HERE / "chat.json", folder)

    tied = make_model(config(num_hidden_layers=2, tie_word_embeddings=True), seed=2)
    folder = HERE / "tiny_llama_tied"
    save_model(folder, tied, torch.float16)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_expected(folder / "expected.safetensors", tied)
    scaling = dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64, rope_theta=10000.0,
    )
    scaled = transformers.LlamaForCausalLM(
        config(num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=scaling)
    ).eval()
    scaled.load_state_dict(tied.state_dict())
    write_expected(folder / "expected_llama3_rope.safetensors", scaled)
    write_config(folder / "config_llama3_rope.json", scaled, torch.float16)

    folder = HERE / "tokenizers"
    folder.mkdir(exist_ok=True)
    byte_fallback_tokenizer().save(str(folder / "byte_fallback.json"))
    for path in HERE.glob("*/*.safetensors"):
        path.chmod(0o644)


if __name__ == "__main__":
    main()
