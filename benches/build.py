#!/usr/bin/env python3
"""What da-build is worth on a real model, as numbers in target/bench/build.json.

    benches/build.py [--data FOLDER] [--only variants,distil,slice,train,families]

variants  training-free drafts of SmolLM2-135M-Instruct: ways to slice and heal, judged by the exact
          overlap with the target (alpha) on its own answers to held-out gsm8k and chat prompts
distil    alpha on the held-out gsm8k answers along 300,000 answer tokens, and what a start without
          healing and a random start come to after the first 25,000
slice     calibrate, slice, heal and write beside the same algorithm in PyTorch: wall time and peak
          memory, in turns (needs torch and transformers: `make vllm`'s packages)
train     training steps beside PyTorch, in turns
families  what `make vllm` found, from target/vllm/families.json

The data folder holds gsm8k/prompts.jsonl and self_instruct/user_oriented_instructions.jsonl. The
target's answers are made once and kept in target/bench; parts that are not asked for keep the
numbers that the file has. Quality does not depend on the machine; run slice and train on an idle
one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "target/bench"
MODEL = ROOT / "target/models/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_DIR = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PROGRAM = TARGET_DIR / "debug/examples/build_bench"
TORCH = ROOT / ".venv-vllm/bin/python"
ENVIRONMENT = {**os.environ, "CANDLE_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
"""As da-build sets it for itself."""
HELD_OUT = 24
LAYERS = [0, 1, 8, 15, 22, 29]
BASE = {"hidden": 288, "mlp": 768, "layers": LAYERS, "tokens": 36000}
VARIANTS = [
    {"name": "default"},
    {"name": "12k tokens of calibration", "tokens": 12000},
    {"name": "not healed", "heal": False},
    {"name": "ridge 0.01 / 0.01", "readers": 0.01, "writers": 0.01},
    {"name": "ridge 0.03 / 0.03", "readers": 0.03, "writers": 0.03},
    {"name": "ridge 0.03 / 0.3", "readers": 0.03, "writers": 0.3},
    {"name": "ridge 1 / 1", "readers": 1.0, "writers": 1.0},
    {"name": "layers 0 1 7 14 21 29", "layers": [0, 1, 7, 14, 21, 29]},
    {"name": "layers 0 5 11 17 23 29", "layers": [0, 5, 11, 17, 23, 29]},
    {"name": "last six layers and the first", "layers": [0, 25, 26, 27, 28, 29]},
    {"name": "4 layers", "layers": [0, 10, 20, 29]},
    {"name": "8 layers", "layers": [0, 1, 6, 10, 15, 20, 24, 29]},
    {"name": "MLP 1152", "mlp": 1152},
    {"name": "narrower and deeper", "hidden": 192, "mlp": 768, "layers": [0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 27, 29]},
    {"name": "46 %, all layers", "hidden": 288, "mlp": 768, "layers": list(range(30))},
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write_prompts(data):
    """Held-out, calibration and distillation prompts; no prompt is in two of them."""
    maths = [row["question"] for row in lines(data / "gsm8k/prompts.jsonl")]
    chat = []
    for row in lines(data / "self_instruct/user_oriented_instructions.jsonl"):
        given = row["instances"][0]["input"]
        chat.append(row["instruction"] + (f"\n\n{given}" if given else ""))
    n = HELD_OUT
    parts = {
        "held_out": [(p, "gsm8k") for p in maths[:n]] + [(p, "chat") for p in chat[:n]],
        "calibration": [
            pair for two in zip(maths[n : n + 200], chat[n:]) for pair in zip(two, ("gsm8k", "chat"))
        ],
        "distil": [(p, "gsm8k") for p in maths[n:]],
    }
    for name, prompts in parts.items():
        text = "".join(json.dumps({"prompt": p, "domain": d}) + "\n" for p, d in prompts)
        path = BENCH / f"{name}.jsonl"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            (BENCH / f"{name}.json").unlink(missing_ok=True)


def answers(name, temperature):
    out = BENCH / f"{name}.json"
    if not out.exists():
        run("answers", MODEL, BENCH / f"{name}.jsonl", out, str(temperature))
    return out


def run(*args, stdin=None):
    result = subprocess.run(
        [PROGRAM, *args], input=stdin, stdout=subprocess.PIPE, text=True, check=True, env=ENVIRONMENT
    )
    return result.stdout


def variants(result, inputs):
    rows = "\n".join(json.dumps({**BASE, **variant}) for variant in VARIANTS)
    found = [json.loads(line) for line in run("variants", MODEL, *inputs, stdin=rows).splitlines()]
    result["variants"] = found
    result["training_free"] = {
        "gsm8k_alpha": found[0]["gsm8k_alpha"],
        "chat_alpha": found[0]["chat_alpha"],
        "params_fraction": found[0]["params_fraction"],
    }
    for row in found:
        print("{name:32} {params_fraction:6.3f}  gsm8k {gsm8k_alpha:.3f}  chat {chat_alpha:.3f}".format(**row))


def teach(inputs, tokens, work, **teach):
    held_out = BENCH / "held_out_gsm8k.json"
    rows = json.loads(inputs[1].read_text())
    held_out.write_text(json.dumps([row for row in rows if row["domain"] == "gsm8k"]))
    start = {"hidden": 288, "mlp": 768, "layers": LAYERS, "tokens": 36000, **teach.pop("variant", {})}
    defaults = {
        "loss": "forward_kl", "top_k": 64, "temperature": 0.8, "on_policy": 0.0, "answer_tokens": 160,
        "learning_rate": 3e-4, "batch": 2, "seed": 0,
    }
    settings = {"variant": start, "teach": {**defaults, "tokens": tokens, **teach}}
    out = run("distil", MODEL, inputs[0], held_out, BENCH / "distil.jsonl", BENCH / work, stdin=json.dumps(settings))
    return json.loads(out)


def distil(result, inputs):
    curve = teach(inputs, 300_000, "distil.work")
    result["distill_curve"] = curve["curve"]
    result["distill_seconds"] = curve["seconds"]
    starts = {"healed, -log alpha": {"loss": "log_alpha"}, "not healed": {"variant": {"heal": False}}}
    result["distill_starts"] = {
        name: teach(inputs, 25_000, f"start-{at}.work", **options)["curve"]
        for at, (name, options) in enumerate(starts.items())
    }
    for point in result["distill_curve"]:
        print("{tokens:8} tokens  alpha {alpha:.3f}".format(**point))


def measured(command, stdin=None):
    """Wall time in seconds and peak memory in MiB of a child."""
    started = time.perf_counter()
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    child.stdin.write(stdin or "")
    child.stdin.close()
    _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        raise SystemExit(f"{command[0]} failed with status {status}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def slicing(result, inputs, turns):
    folder = BENCH / "target-hf"
    if not folder.exists():
        subprocess.run(
            [TARGET_DIR / "debug/da-build", "--model", MODEL, "--output", folder, "--es", "1", "--ls", "1", "--dtype", "f32"],
            check=True, stdout=subprocess.DEVNULL,
        )
    rows = json.loads(inputs[0].read_text())
    texts, total = [], 0
    for row in rows:
        total += len(row["prompt_ids"]) + len(row["output_ids"])
        if total > 12_000:
            break
        texts.append(row)
    part = BENCH / "slice.json"
    part.write_text(json.dumps(texts))
    ids = BENCH / "slice_ids.json"
    ids.write_text(json.dumps([row["prompt_ids"] + row["output_ids"] for row in texts]))
    ours, theirs = [], []
    for _ in range(turns):
        shutil.rmtree(BENCH / "sliced", ignore_errors=True)
        command = [PROGRAM, "slice", folder, part, BENCH / "sliced"]
        ours.append(measured(command, json.dumps({"hidden": 288, "mlp": 768, "layers": LAYERS})))
        shutil.rmtree(BENCH / "sliced-torch", ignore_errors=True)
        peer = [
            TORCH, ROOT / "benches/slice_torch.py", folder, ids, "288", "768",
            ",".join(map(str, LAYERS)), BENCH / "sliced-torch",
        ]
        theirs.append(measured(peer))
        print("slice {:.1f} s, {:.0f} MiB; torch {:.1f} s, {:.0f} MiB".format(*ours[-1], *theirs[-1]), flush=True)
    median = statistics.median
    result["slice"] = {
        "tokens": total,
        "seconds": median(t for t, _ in ours),
        "torch_seconds": median(t for t, _ in theirs),
        "wall_ratio": median(a[0] / b[0] for a, b in zip(ours, theirs)),
        "memory_mib": median(m for _, m in ours),
        "torch_memory_mib": median(m for _, m in theirs),
        "memory_ratio": median(a[1] / b[1] for a, b in zip(ours, theirs)),
    }


def training(result, turns):
    draft = BENCH / "distil.work.partial/untaught"
    out = BENCH / "train.json"
    subprocess.run(
        [TORCH, ROOT / "benches/train.py", draft, "--turns", str(turns), "--out", out], check=True
    )
    found = json.loads(out.read_text())
    result["distill"] = {"tokens_per_s_ratio": found["ratio"], **found}


def families(result):
    path = ROOT / "target/vllm/families.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    result["families_verified_in_vllm"] = found.get("verified", [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--only", default="variants,distil,slice,train,families")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    BENCH.mkdir(parents=True, exist_ok=True)
    path = BENCH / "build.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    write_prompts(args.data)
    inputs = [answers("calibration", 0.8), answers("held_out", 0.7)]
    parts = {
        "variants": lambda: variants(result, inputs),
        "distil": lambda: distil(result, inputs),
        "slice": lambda: slicing(result, inputs, args.turns),
        "train": lambda: training(result, args.turns),
        "families": lambda: families(result),
    }
    for part in args.only.split(","):
        print(f"== {part}", flush=True)
        parts[part]()
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
