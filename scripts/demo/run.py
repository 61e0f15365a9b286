#!/usr/bin/env python3
"""Runs the whole loop on a real model: build, serve, learn, swap, measure. See `--help`."""

import argparse
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import cost
import evaluate
import machine
import prompts
import report
import summary
from api import fetch_json
from learning import Learning
from loop import Loop
from processes import Children, StepFailed
from progress import Progress
from record import Phase, Record
from stack import Stack
from traffic import Client

ROOT = Path(__file__).resolve().parents[2]
AIMED_ACCEPTANCE = 0.65
"""The acceptance that the draft length is chosen for."""

HUB_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")

FAILED, USAGE, FELL_SHORT = 1, 64, 2


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    model = "target/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", default=str(ROOT / model), help="target: folder, GGUF file or hub repository")
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/debug", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "target/demo", metavar="DIR")
    parser.add_argument("--requests", type=int, default=240, help="for each domain to learn from")
    parser.add_argument("--again", type=int, default=60, help="for the first domain's second turn")
    parser.add_argument("--sampled", type=int, default=40, help="for the phase at temperature 0.7")
    parser.add_argument("--burst", type=int, default=32, help="requests between pauses for learning")
    parser.add_argument("--trickle", type=int, default=8, help="requests during such a pause, at most")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--held-out", type=int, default=16, help="held-out prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-length", type=int, help="default: what the measured costs favour")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learn-seconds", type=float, default=60, help="bound of one pause")
    parser.add_argument("--budget-minutes", type=float, default=19, help="traffic ends early for it")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft v0, instead of building one")
    parser.add_argument("--build", action="append", default=[], metavar="ARG", help="for da-build")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for da-sidecar")
    parser.add_argument("--strict", action="store_true", help="exit with 2 when a goal is missed")
    args = parser.parse_args()
    for pair in args.set:
        if "=" not in pair:
            parser.error(f"--set {pair}: expected KEY=VALUE")
    return args


EVALUATION_SECONDS = 240
"""What is kept of the budget for the comparison at the end."""


def phases(args):
    first, second = prompts.DOMAINS
    train = {d: prompts.prompts(d, "train", args.requests, args.seed) for d in (first, second)}
    # Half of them were asked before: their answers must not have changed with the draft.
    asked = train[first][: args.again // 2]
    unasked = prompts.prompts(first, "train", None, args.seed)[args.requests :]
    again = asked + unasked[: args.again - len(asked)]
    return [
        Phase(first, first, train[first], 0.0),
        Phase(second, second, train[second], 0.0),
        Phase(f"{first} again", first, again, 0.0),
        Phase(f"{second} again", second, train[second][: args.sampled], 0.7),
    ]


def demo(args, progress, children, record):
    began = time.monotonic()
    stack = Stack(children, args.binaries, args.model, args.out)
    held_out = {d: prompts.prompts(d, "held-out", args.held_out, args.seed) for d in prompts.DOMAINS}

    with record.timed("build"):
        record.plan = stack.plan(args.build)
        if args.draft:
            progress.step(f"draft v0 is {args.draft}")
            shutil.copytree(args.draft, stack.draft)
        else:
            progress.step(f"building draft v0 from {Path(args.model).name}")
            stack.build(args.build, lambda line: progress.step(f"  {line}") if line.strip() else None)

    with record.timed("start"):
        record.draft_length = choose_draft_length(args, stack, record, progress)
        # Several streams at once verify many rows, so they bear only shorter drafts.
        record.live_draft_length = cost.best_length(record.curve, AIMED_ACCEPTANCE, args.concurrency)
        _, engine = stack.serve("da-serve", stack.draft, record.live_draft_length)
        _, bench = stack.serve("da-serve-adapted", stack.draft, record.draft_length)
        more = dict(pair.split("=", 1) for pair in args.set)
        proxy, admin = stack.sidecar(engine, record.draft_length, more)
    progress.step(f"engine {engine}, sidecar for clients {proxy}, its status {admin}/status")

    learning = Learning(admin)
    deadline = began + 60 * args.budget_minutes - EVALUATION_SECONDS
    client = Client(proxy, args.max_tokens)
    loop = Loop(args, record, stack, progress, client, engine, learning, deadline)
    bench_client = Client(bench, args.max_tokens)
    for phase in phases(args):
        loop.run(phase)
        if phase.temperature == 0:
            with record.timed("checkpoints"):
                loop.checkpoint(phase, bench_client, bench, held_out)

    stack.control("pause")
    record.status = learning.status()
    version = record.status["running"]
    with record.timed("comparison"):
        stack.swap(bench, version)
        _, plain = stack.serve("da-serve-plain", None, 0)
        _, static = stack.serve("da-serve-static", stack.draft, record.draft_length)
        compare(args, record, progress, held_out, {"plain": plain, "static": static, "adapted": bench})
    children.check()


def choose_draft_length(args, stack, record, progress):
    """Has the engine measure what verifying and drafting cost, and picks k by it."""
    child, base = stack.serve("da-serve-costs", stack.draft, "auto")
    record.curve = fetch_json(f"{base}/v1/draft_adapter/engine")["cost_curve"]
    stack.children.stop(child)
    verify = " ".join(f"{ms:.1f}" for ms in record.curve["verify_ms"])
    progress.step(f"one target forward of 1, 2, ... rows takes {verify} ms")
    progress.step(f"one draft step takes {record.curve['draft_ms'][0]:.1f} ms")
    k = args.draft_length or cost.best_length(record.curve, AIMED_ACCEPTANCE)
    gain = cost.speed_up(record.curve, AIMED_ACCEPTANCE, k)
    progress.step(
        f"draft length k = {k}: {gain:.2f} times plain decoding at acceptance {AIMED_ACCEPTANCE}"
    )
    return k


def compare(args, record, progress, held_out, bases):
    clients = {name: Client(base, args.max_tokens) for name, base in bases.items()}
    evaluate.warm_up(clients)
    for domain, questions in held_out.items():
        progress.step(f"comparing on {len(questions)} held-out {domain} prompts, one at a time")
        answered = [0]

        def count(answered=answered):
            answered[0] += 1

        total = len(questions) * len(bases)
        progress.watch(lambda: f"{domain} {answered[0]}/{total} answers")
        results = evaluate.compare(clients, bases, questions, count)
        progress.watch(None)
        record.results[domain] = results
        for name, result in results.items():
            for answer in result.answers:
                if answer.error:
                    record.failures.append({"request": f"{domain}, {name}", "error": answer.error})
                else:
                    record.texts.add(answer.prompt, answer.text, f"{name}, held-out")


def main():
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not Path(args.model).exists() and not HUB_REPOSITORY.fullmatch(args.model):
        print(f"error: no model at {args.model}\nhint: `make model` fetches one", file=sys.stderr)
        return USAGE
    if args.out.exists():
        shutil.rmtree(args.out)
    args.out.mkdir(parents=True)
    about = machine.describe()
    progress = Progress()
    record = Record()
    started = time.monotonic()
    try:
        with Children(args.out) as children:
            demo(args, progress, children, record)
    except KeyboardInterrupt:
        progress.step("stopped")
        return 130
    except (StepFailed, OSError) as error:
        progress.close()
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        progress.close()
    document = summary.document(args, record, about, time.monotonic() - started)
    page = report.write(args.out, document)
    print(summary.text(document))
    print(f"\nReport  {page}\nNumbers {page.with_suffix('.json')}\nLogs    {args.out}/*.log")
    return FELL_SHORT if args.strict and document["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
