#!/usr/bin/env python3
"""Loads a draft of every family in vLLM and compares its greedy tokens with this project's decoder.

    scripts/vllm/check.py --out target/vllm [--binaries target/debug] [family ...]

Makes random targets with transformers, drafts of half their width and depth with da-build (of half
the depth for Gemma 2, whose width stays), and runs both engines in float32. Needs a Python with
vLLM; da-build and the `greedy` example are built beforehand. Prints one line for each family and
writes families.json; exits with 1 when one differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[1, 17, 42, 99, 200], [5, 250, 13], [77, 8, 9, 10, 11, 12, 13, 14]]
TOKENS = 24
NEAR_TIE = 1e-3
"""Where the best two logits are this close, the order of summation decides, and the rest of that
answer is not compared."""


def vllm_answers(folder):
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, max_model_len=256,
        skip_tokenizer_init=True, disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]


def compared(ours, theirs):
    """Tokens that agree and tokens that were compared."""
    agree = total = 0
    for own, other in zip(ours, theirs):
        for mine, margin, yours in zip(own["tokens"], own["margins"], other):
            if margin < NEAR_TIE and mine != yours:
                break
            total += 1
            agree += mine == yours
            if mine != yours:
                break
    return agree, total


def check(family, args):
    target, draft = args.out / "targets" / family, args.out / "drafts" / family
    shutil.rmtree(draft, ignore_errors=True)
    shrink = ["--ls", "0.5"] + ([] if family == "gemma2" else ["--es", "0.5"])
    subprocess.run(
        [args.binaries / "da-build", "--model", target, "--output", draft, *shrink, "--dtype", "f32",
         "--calibration-tokens", "1500"],
        check=True, stdout=subprocess.DEVNULL,
    )
    greedy = subprocess.run(
        [args.binaries / "examples" / "greedy", draft, str(TOKENS)], input=json.dumps(PROMPTS),
        check=True, capture_output=True, text=True,
    )
    ours = json.loads(greedy.stdout)
    child = subprocess.run(
        [sys.executable, __file__, "--answers", draft], capture_output=True, text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
             "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("[[")]
    if child.returncode != 0 or not lines:
        return {"family": family, "error": (child.stderr or child.stdout)[-2000:]}
    agree, total = compared(ours, json.loads(lines[-1]))
    config = json.loads((draft / "config.json").read_text())
    return {"family": family, "carrier": config["architectures"][0], "agree": agree, "compared": total}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "target/vllm")
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/debug")
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answers:
        print(json.dumps(vllm_answers(args.answers)))
        return 0
    import make_models

    results = []
    for family in args.families or list(make_models.FAMILIES):
        folder = args.out / "targets" / family
        shutil.rmtree(folder, ignore_errors=True)
        make_models.make(family, folder)
        shutil.copy(ROOT / "tests/golden/tiny_llama/tokenizer.json", folder)
        result = check(family, args)
        results.append(result)
        if "error" in result:
            print(f"{family}: FAILED\n{result['error']}", flush=True)
        else:
            print("{family} as {carrier}: {agree} of {compared} tokens agree".format(**result), flush=True)
    (args.out / "families.json").write_text(json.dumps(results, indent=2) + "\n")
    wanted = 2 * TOKENS
    good = all(r.get("agree") == r.get("compared", -1) >= wanted for r in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
