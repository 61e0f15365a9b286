"""From the record of a run to `report.json`: comparison, goals, and what fell short and why."""

import bisect
import time
from pathlib import Path

import cost
import prompts

SERVERS = ("plain", "static", "adapted")

DEFINITIONS = {
    "acceptance": "accepted drafted tokens over judged ones: those whose predecessors in the draft"
    " were all accepted. It is the chance that one more drafted token is right, and does not depend"
    " on the draft length.",
    "accepted_share": "accepted drafted tokens over all drafted ones, as vLLM's counters give it;"
    " it falls as the draft length grows.",
    "mean_length": "tokens of one verification, the target's own one included.",
    "tokens_per_s": "completion tokens over the time of whole requests, reading the prompt included;"
    " one request at a time.",
}


def document(args, record, machine, seconds):
    domains = [domain(name, results, record) for name, results in record.results.items()]
    swaps = swap_list(record)
    training = record.status["training"]
    mismatches = record.texts.mismatches()
    report = {
        "finished": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "target": Path(args.model).name,
        "target_params": record.plan["target_parameters"],
        "draft_params": record.plan["draft_parameters"],
        "draft_params_per_step": record.plan.get("draft_parameters_per_step"),
        "draft_length": record.draft_length,
        "live_draft_length": record.live_draft_length,
        "domains": domains,
        "swaps": swaps,
        "requests": len(record.spans) + len(record.repeats),
        "requests_not_learned_from": len(record.repeats),
        "failed_requests": len(record.failures),
        "output_mismatches": len(mismatches),
        "texts_compared": len(record.texts.seen),
        "training_tokens": training["tokens"],
        "training_seconds": training["seconds"],
        "retention": retention(record),
        "cost_curve": cost_curve(record),
        "phases": [phase(p) for p in record.phases],
        "timeline": record.windows,
        "checkpoints": record.checkpoints,
        "versions": [version(v) for v in record.status["versions"]],
        "sidecar_counters": record.status.get("counters"),
        "failures": record.failures[:20],
        "mismatches": mismatches[:5],
        "unlearned": record.unlearned,
        "seconds": seconds,
        "seconds_by_step": record.steps,
        "machine": machine,
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "definitions": DEFINITIONS,
    }
    report["goals"] = goals(report)
    report["misses"] = [goal for goal in report["goals"] if not goal["met"]]
    return report


def domain(name, results, record):
    k = record.draft_length
    entry = {
        "name": name,
        "held_out_prompts": len(results["plain"].answers),
        "learned_requests": sum(
            p.last_request - p.first_request + 1 for p in record.phases if p.domain == name
        ),
    }
    for server in ("static", "adapted"):
        counters = results[server].counters
        entry[f"acceptance_{server}"] = counters.acceptance(k)
        entry[f"accepted_share_{server}"] = counters.accepted_share()
        entry[f"mean_length_{server}"] = counters.mean_length()
    for server in SERVERS:
        entry[f"tokens_per_s_{server}"] = results[server].tokens_per_second()
    entry["speed_up_adapted"] = ratio(entry["tokens_per_s_adapted"], entry["tokens_per_s_plain"])
    entry["speed_up_static"] = ratio(entry["tokens_per_s_static"], entry["tokens_per_s_plain"])
    return entry


def ratio(a, b):
    return a / b if a is not None and b else None


def swap_list(record):
    swaps = []
    ends = sorted(end for _, end in record.spans)
    spans = record.spans + record.repeats
    for swap in record.status["swaps"]:
        moment = swap["unix_ms"] / 1000
        swaps.append(
            {
                "version": swap["version"],
                "from": swap.get("from"),
                "cause": swap.get("cause"),
                "stall_ms": swap["stall_ms"],
                "stage_ms": swap.get("stage_ms"),
                "gate_before": swap.get("gate_before"),
                "gate_after": swap.get("gate_after"),
                "unix_ms": swap["unix_ms"],
                "after_request": bisect.bisect(ends, moment),
                "requests_in_flight": sum(1 for a, b in spans if a <= moment <= b),
            }
        )
    return swaps


def version(entry):
    return {key: entry.get(key) for key in ("version", "parent", "state", "gate", "live", "reason")}


def phase(p):
    return {
        "name": p.name,
        "domain": p.domain,
        "temperature": p.temperature,
        "first_request": p.first_request,
        "last_request": p.last_request,
        "seconds": p.seconds,
        "cut": p.cut,
    }


def retention(record):
    """How much of its best held-out acceptance the first domain kept once the second was learned."""
    first = next(iter(prompts.DOMAINS))
    values = [point["domains"].get(first) for point in record.checkpoints]
    if len(values) < 2 or None in values[:2]:
        return None
    best, after = values[0], values[1]
    return {"domain": first, "best_before": best, "after_second_domain": after, "kept": ratio(after, best)}


def cost_curve(record):
    curve, k = record.curve, record.draft_length
    return {
        **curve,
        "chosen_k": k,
        "verify_cost": ratio(curve["verify_ms"][k], curve["verify_ms"][0]),
        "draft_cost": ratio(curve["draft_ms"][0], curve["verify_ms"][0]),
    }


def goals(report):
    """What the demo must reach: name, what was wanted, what came, and the reason for a miss."""
    found = []

    def goal(name, wanted, got, met, reason):
        met = bool(met)
        found.append(
            {"name": name, "wanted": wanted, "got": got, "met": met, "reason": None if met else reason}
        )

    for d in report["domains"]:
        adapted, static, speed = d["acceptance_adapted"], d["acceptance_static"], d["speed_up_adapted"]
        known = adapted is not None and static is not None
        goal(f"{d['name']}: acceptance of the adapted draft", "at least 0.60", number(adapted),
             adapted is not None and adapted >= 0.60, learning_reason(report, d))
        goal(f"{d['name']}: gain over the static draft", "at least 0.15",
             number(adapted - static if known else None), known and adapted - static >= 0.15,
             learning_reason(report, d))
        goal(f"{d['name']}: speed over plain decoding", "at least 1.15 times", number(speed),
             speed is not None and speed >= 1.15, speed_reason(report, d))
        goal(f"{d['name']}: requests learned from", "at most 300", d["learned_requests"],
             d["learned_requests"] <= 300, "the demo was asked to send more")
    kept = report["retention"]
    goal("first domain kept after the second was learned", "at least 0.95 of its best",
         number(kept["kept"]) if kept else "not measured", kept and kept["kept"] >= 0.95,
         "learning the second domain cost the first more than replay gave back" if kept
         else "a phase or checkpoint is missing")
    published = sum(1 for s in report["swaps"] if s["cause"] in (None, "publish"))
    goal("swaps", "at least 3", published, published >= 3, learning_reason(report, None))
    goal("failed requests", "0", report["failed_requests"], report["failed_requests"] == 0,
         "; ".join(f["error"] for f in report["failures"][:2]))
    goal("output mismatches", "0", report["output_mismatches"], report["output_mismatches"] == 0,
         "an answer at temperature 0 changed with the draft, which is a defect")
    return found


def learning_reason(report, d):
    reasons = [p["cut"] for p in report["phases"] if p["cut"] and (not d or p["domain"] == d["name"])]
    reasons += report["unlearned"][:2]
    verdicts = (report["sidecar_counters"] or {}).get("gate") or {}
    reasons.append(
        f"{report['training_tokens']} tokens were trained on in {report['training_seconds']:.0f} s;"
        f" gate decisions: {verdicts or 'none'}"
    )
    return "; ".join(reasons)


def speed_reason(report, d):
    curve, a = report["cost_curve"], d["acceptance_adapted"]
    if a is None:
        return "nothing was drafted"
    k = curve["chosen_k"]
    expected = cost.speed_up(curve, a, k)
    return (
        f"a verification of {k + 1} rows costs {curve['verify_cost']:.2f} plain steps and a drafted"
        f" token {curve['draft_cost']:.2f}, so acceptance {a:.2f} can give {expected:.2f} times"
    )


def number(value, digits=2):
    return "--" if value is None else round(value, digits)


def text(report):
    """The result for the terminal."""
    lines = [
        "",
        f"{'held-out, temperature 0':26}{'plain':>9}{'static':>9}{'adapted':>9}",
    ]
    for d in report["domains"]:
        lines.append(d["name"])
        for label, key, digits in (
            ("acceptance", "acceptance", 3),
            ("accepted / drafted", "accepted_share", 3),
            ("mean accepted length", "mean_length", 2),
            ("tokens/s", "tokens_per_s", 1),
        ):
            cells = [number(d.get(f"{key}_{server}"), digits) for server in SERVERS]
            lines.append(f"  {label:24}" + "".join(f"{cell:>9}" for cell in cells))
        speed = d["speed_up_adapted"]
        lines.append(f"  {'speed over plain':24}{'':18}{number(speed):>9}")
    stalls = [s["stall_ms"] for s in report["swaps"]]
    in_flight = sum(1 for s in report["swaps"] if s["requests_in_flight"])
    lines += [
        "",
        f"{report['requests']} requests, {report['failed_requests']} failed,"
        f" {report['output_mismatches']} changed answers of {report['texts_compared']} compared,"
        f" {len(report['swaps'])} swaps, {in_flight} with requests in flight"
        f" (longest stall {max(stalls, default=0):.1f} ms),"
        f" {report['training_tokens']} tokens trained in {report['training_seconds']:.0f} s,"
        f" {report['seconds'] / 60:.1f} minutes",
    ]
    for miss in report["misses"]:
        lines.append(f"FELL SHORT  {miss['name']}: wanted {miss['wanted']}, got {miss['got']}")
        lines.append(f"            {miss['reason']}")
    if not report["misses"]:
        lines.append("All goals were met.")
    return "\n".join(lines)
