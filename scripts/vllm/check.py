#!/usr/bin/env python3
"""Loads a draft of every family in vLLM and compares its greedy tokens with this project's decoder.

    scripts/vllm/check.py [--out target/vllm] [--binaries target/debug] [case ...]

Makes random targets with transformers and drafts of them with da-build, runs both engines in
float32, and last serves one target with its draft in vLLM's speculative decoding. Needs a Python
with vLLM; da-build and the `greedy` example are built beforehand. Prints one line for each case and
writes families.json; exits with 1 when one differs. Where vLLM cannot run at all (its CPU build
wants AVX2 on x86) it says so, verifies nothing and exits with 0.
"""

import argparse
import json
import os
import platform
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
SPECULATIVE, TRIMMED = "speculative", "trimmed"
PAIRS = {SPECULATIVE: {}, TRIMMED: {"use_heterogeneous_vocab": True}}
"""Cases that serve a target with its draft, and what vLLM is told besides."""
DRAFTED = 3
MARK = "@@"


def cannot_run():
    """Why vLLM's CPU build does not run here; None when it does."""
    if platform.machine() != "x86_64":
        return None
    flags = Path("/proc/cpuinfo").read_text().split()
    return None if "avx2" in flags else "this processor has no AVX2, which vLLM's CPU kernels want"


def build(case, make_models, args):
    """Makes the target and its draft; returns this project's own greedy answers."""
    target, draft = args.out / "targets" / case, args.out / "drafts" / case
    for folder in (target, draft):
        shutil.rmtree(folder, ignore_errors=True)
    make_models.make("llama" if case in PAIRS else case, target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "tests/golden/tiny_llama" / name, target)
    subprocess.run(
        [args.binaries / "da-build", "--model", target, "--output", draft, *make_models.SHRINK[case],
         "--dtype", "f32", "--calibration-tokens", "1500"],
        check=True, stdout=subprocess.DEVNULL,
    )
    if case in PAIRS:
        return None
    greedy = subprocess.run(
        [args.binaries / "examples" / "greedy", draft, str(TOKENS)], input=json.dumps(PROMPTS),
        check=True, capture_output=True, text=True,
    )
    return json.loads(greedy.stdout)


def load(model, **more):
    from vllm import LLM

    return LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        disable_log_stats=not more, **{"skip_tokenizer_init": True, **more},
    )


def generate(llm):
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def pair(out, case):
    """A target alone and with its draft: texts of both, and the counters of the latter."""
    target, draft = out / "targets" / case, out / "drafts" / case
    alone = load(target)
    plain = generate(alone)
    unload(alone)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": DRAFTED}
    llm = load(target, speculative_config={**config, **PAIRS[case]}, skip_tokenizer_init=not PAIRS[case])
    drafted = generate(llm)
    counters = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num") and hasattr(metric, "value")
    }
    unload(llm)
    return {"plain": plain, "drafted": drafted, "counters": counters}


def unload(llm):
    """Lets go of an engine, so that the process can start the next one."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def answer(out, cases):
    """The child: runs the cases in one process, as importing vLLM takes longer than running it."""
    for case in cases:
        if case in PAIRS:
            found = pair(out, case)
        else:
            llm = load(out / "drafts" / case)
            found = generate(llm)
            unload(llm)
        print(MARK + json.dumps({"case": case, "found": found}), flush=True)


def answers(out, cases):
    """What vLLM makes of every case; a case that ends the child has its last words instead."""
    found, left = {}, list(cases)
    while left:
        child = subprocess.run(
            [sys.executable, __file__, "--out", out, "--answers", *left], capture_output=True, text=True,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                 "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                 "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        for line in child.stdout.splitlines():
            if line.startswith(MARK):
                row = json.loads(line[len(MARK):])
                found[row["case"]] = row["found"]
        left = [case for case in left if case not in found]
        if left:
            found[left.pop(0)] = {"error": (child.stderr or child.stdout)[-3000:]}
    return found


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


def judge(case, ours, theirs, out):
    """A row of the result; it has an error where something is wrong."""
    if "error" in theirs:
        return {"case": case, **theirs}
    if case in PAIRS:
        counters = theirs["counters"]
        accepted = counters.get("vllm:spec_decode_num_accepted_tokens", 0)
        drafted = counters.get("vllm:spec_decode_num_draft_tokens", 0)
        row = {"case": case, "drafted": drafted, "accepted": accepted}
        if theirs["plain"] != theirs["drafted"]:
            row["error"] = f"the draft changed the text: {theirs['plain']} became {theirs['drafted']}"
        elif not 0 < accepted <= drafted:
            row["error"] = f"expected some drafted tokens to be accepted, got {counters}"
        return row
    agree, total = compared(ours, theirs)
    config = json.loads((out / "drafts" / case / "config.json").read_text())
    row = {"case": case, "carrier": config["architectures"][0], "agree": agree, "compared": total}
    if agree != total or total < 2 * TOKENS:
        row["error"] = f"{agree} of {total} tokens agree, expected all of at least {2 * TOKENS}"
    return row


def say(row):
    if "error" in row:
        print(f"{row['case']}: FAILED\n{row['error']}", flush=True)
    elif "carrier" in row:
        print("{case} as {carrier}: {agree} of {compared} tokens agree".format(**row), flush=True)
    else:
        print("{case}: {accepted} of {drafted} drafted tokens accepted, the text unchanged".format(**row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "target/vllm")
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/debug")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answers:
        answer(args.out, args.cases)
        return 0
    os.environ["TQDM_DISABLE"] = "1"
    import make_models

    args.out.mkdir(parents=True, exist_ok=True)
    result = {"rows": [], "verified": []}
    reason = cannot_run()
    if reason:
        result["skipped"] = reason
        print(f"skipped: {reason}; nothing is verified")
    else:
        cases = args.cases or [*make_models.MODELS, *PAIRS]
        ours = {case: build(case, make_models, args) for case in cases}
        theirs = answers(args.out, cases)
        result["rows"] = [judge(case, ours[case], theirs[case], args.out) for case in cases]
        for row in result["rows"]:
            say(row)
        good = [row["case"] for row in result["rows"] if "error" not in row]
        result["verified"] = [case for case in good if case not in PAIRS]
    (args.out / "families.json").write_text(json.dumps(result, indent=2) + "\n")
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
