"""Prints what transformers computes for the demo's target, for tests/real_gguf.rs.

Needs torch, transformers, accelerate and gguf; takes the GGUF file as its argument.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

path = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
messages = [{"role": "user", "content": "What is the capital of France?"}]
ids = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]
logprobs = torch.log_softmax(model(ids).logits[0, -1].double(), -1)
values, tokens = logprobs.topk(5)
print(ids[0].tolist())
print([(t, round(v, 4)) for t, v in zip(tokens.tolist(), values.tolist())])
