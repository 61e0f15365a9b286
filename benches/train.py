#!/usr/bin/env python3
"""Training steps per second of this project and of PyTorch, in turns on the same draft.

    benches/train.py DRAFT [--turns 3] [--out FILE]

Both take two windows of 256 tokens a step with a loss at every position: forward KL to a
teacher's top 20 and the rest as one bucket, AdamW, float32, all cores. PyTorch runs the same
folder as a transformers model. Needs torch and transformers; the Rust side is built beforehand:
`cargo build --example train_speed`. The two never run at the same time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LENGTH, TOP_K, STEPS = 256, 20, 12


def torch_step_ms(draft):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    vocabulary = model.config.vocab_size
    times = []
    for _ in range(STEPS):
        ids = torch.randint(0, vocabulary, (2, LENGTH))
        first = torch.randint(0, vocabulary - TOP_K, (2, LENGTH, 1))
        top = first + torch.arange(TOP_K)
        teacher = torch.full((2, LENGTH, TOP_K), 0.95 / TOP_K)
        started = time.perf_counter()
        logprobs = torch.log_softmax(model(ids, use_cache=False).logits, -1)
        kept = logprobs.gather(-1, top)
        tail = torch.log1p(-kept.exp().sum(-1).clamp(max=1 - 1e-6))
        p_tail = 1 - teacher.sum(-1)
        loss = (teacher * (teacher.log() - kept)).sum(-1) + p_tail * (p_tail.log() - tail)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--torch-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_only:
        print(torch_step_ms(args.draft))
        return 0
    binary = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug/examples/train_speed"
    environment = {**os.environ, "CANDLE_NUM_THREADS": "1"}
    ours, theirs = [], []
    for turn in range(args.turns):
        out = subprocess.run(
            [binary, args.draft, str(STEPS)], env=environment, check=True, capture_output=True, text=True
        )
        ours.append(json.loads(out.stdout)["step_ms"])
        command = [sys.executable, __file__, args.draft, "--torch-only"]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs.append(float(out.stdout.split()[-1]))
        print(f"turn {turn + 1}: {ours[-1]:.0f} ms a step, torch {theirs[-1]:.0f} ms", flush=True)
    speed = [2 * LENGTH / (ms / 1000) for ms in (statistics.median(ours), statistics.median(theirs))]
    ratios = [b / a for a, b in zip(ours, theirs)]
    result = {
        "tokens_per_s": round(speed[0]),
        "torch_tokens_per_s": round(speed[1]),
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(result))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
