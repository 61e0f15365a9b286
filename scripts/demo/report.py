#!/usr/bin/env python3
"""Writes `report.json` and the page `report.html`, which needs nothing but a browser.

`python3 scripts/demo/report.py target/demo/report.json` makes the page again from the numbers.
"""

import json
import sys
from html import escape
from pathlib import Path
from string import Template

import chart

TEMPLATE = Path(__file__).with_name("report.html.in")
SERVERS = (("plain", "no speculation"), ("static", "static draft v0"), ("adapted", "adapted draft"))


def write(folder, report):
    """Writes both files; returns the page's path."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    path = folder / "report.html"
    path.write_text(page(report))
    return path


def page(report):
    return Template(TEMPLATE.read_text()).substitute(
        target=escape(report["target"]),
        headline=headline(report),
        subline=subline(report),
        tiles="".join(tiles(report)),
        acceptance_chart=chart.acceptance_chart(report),
        legend=legend(report),
        chart_note="Each point is the acceptance of about ten requests. Traffic comes in bursts; between"
        " them the draft learns while single requests go on. Diamonds are prompts that were never learned from, asked of"
        " the version that ran at that moment. Point at anything for its numbers.",
        comparison=comparison(report),
        bar_chart=chart.bar_chart(report),
        cost_chart=chart.cost_chart(report),
        cost_note=cost_note(report),
        misses_title=misses_title(report),
        misses=goals(report),
        swaps=swaps(report),
        run=definition_list(run_facts(report)),
        definitions=definition_list(report["definitions"].items()),
    )


def headline(report):
    gains = [d for d in report["domains"] if d["acceptance_adapted"] is not None]
    if not gains:
        return "The run drafted nothing"
    parts = [
        f"{escape(d['name'])} {percent(d['acceptance_static'])} to {percent(d['acceptance_adapted'])}"
        for d in gains
    ]
    return "Acceptance on held-out prompts: " + ", ".join(parts)


def subline(report):
    share = report["draft_params"] / report["target_params"]
    return (
        f"{escape(report['target'])}, {millions(report['target_params'])} parameters, with a draft of"
        f" {millions(report['draft_params'])} ({100 * share:.0f} %) made from it and trained on"
        f" {report['requests'] - report['requests_not_learned_from']} proxied requests. {escape(report['finished'])}."
    )


def tiles(report):
    for index, d in enumerate(report["domains"]):
        yield tile(
            f"{escape(d['name'])}: speed over plain decoding",
            times(d["speed_up_adapted"]),
            f"{number(d['tokens_per_s_plain'], 1)} to {number(d['tokens_per_s_adapted'], 1)} tokens/s",
            f"d{index}",
        )
    stalls = [s["stall_ms"] for s in report["swaps"]]
    busy = sum(1 for s in report["swaps"] if s["requests_in_flight"])
    yield tile(
        "versions swapped in",
        len(report["swaps"]),
        f"{busy} with requests in flight; longest stall {max(stalls):.1f} ms" if stalls else "none",
    )
    yield tile(
        "requests failed, answers changed",
        f"{report['failed_requests']}, {report['output_mismatches']}",
        f"of {report['requests']} requests, {report['texts_compared']} texts compared",
    )


def tile(label, value, note, kind=""):
    return (
        f'<div class="card tile {kind}"><span class="faint">{label}</span><b>{value}</b>'
        f'<span class="note">{note}</span></div>'
    )


def legend(report):
    parts = []
    for index, d in enumerate(report["domains"]):
        line = f'<path class="line d{index}" d="M0 6 L22 6"/><circle class="dot d{index}" cx="11" cy="6" r="3"/>'
        parts.append(f'<span><svg width="22" height="12">{line}</svg>{escape(d["name"])}</span>')
    diamond = '<path class="held-out d0" d="M8 1 l5 5 l-5 5 l-5 -5 z"/>'
    parts.append(f'<span><svg width="16" height="12">{diamond}</svg>held-out prompts</span>')
    swap = '<g class="swap"><line x1="6" x2="6" y1="0" y2="6"/><path d="M2 13 l4 -7 l4 7 z"/></g>'
    parts.append(f'<span><svg width="12" height="14">{swap}</svg>swap</span>')
    return "".join(parts)


def comparison(report):
    rows = ['<table><tr><th class="left">domain</th><th class="left">server</th><th>acceptance</th>'
            "<th>accepted of drafted</th><th>mean accepted length</th><th>tokens/s</th><th>speed</th></tr>"]
    for d in report["domains"]:
        for server, label in SERVERS:
            speed = {"plain": 1.0, "static": d["speed_up_static"], "adapted": d["speed_up_adapted"]}
            cells = [
                percent(d.get(f"acceptance_{server}")),
                percent(d.get(f"accepted_share_{server}")),
                number(d.get(f"mean_length_{server}"), 2),
                number(d.get(f"tokens_per_s_{server}"), 1),
                times(speed[server]),
            ]
            best = ' class="best"' if server == "adapted" else ""
            name = escape(d["name"]) if server == "plain" else ""
            rows.append(
                f'<tr><td class="left">{name}</td><td class="left">{label}</td>'
                + "".join(f"<td{best}>{cell}</td>" for cell in cells)
                + "</tr>"
            )
    rows.append("</table>")
    kept = report["retention"]
    if kept:
        rows.append(
            f'<p class="note">After the second domain was learned, {escape(kept["domain"])} kept'
            f" {percent(kept['kept'])} of its best held-out acceptance"
            f" ({percent(kept['best_before'])} to {percent(kept['after_second_domain'])}).</p>"
        )
    return "".join(rows)


def misses_title(report):
    missed, total = len(report["misses"]), len(report["goals"])
    return f"What fell short: {missed} of {total} goals" if missed else f"All {total} goals were met"


def cost_note(report):
    curve = report["cost_curve"]
    return (
        f"Left: the servers took turns in blocks of prompts. Right: the engine's own measurement, by"
        f" which k = {curve['chosen_k']} was chosen; a drafted token costs"
        f" {100 * curve['draft_cost']:.0f} % of a plain step."
    )


def goals(report):
    rows = ['<table><tr><th class="left">goal</th><th class="left">wanted</th><th>got</th>'
            '<th class="left">why not</th></tr>']
    # What fell short comes first.
    for goal in sorted(report["goals"], key=lambda goal: goal["met"]):
        kind = "good" if goal["met"] else "bad"
        rows.append(
            f'<tr><td class="left">{escape(goal["name"])}</td><td class="left">{escape(goal["wanted"])}'
            f'</td><td class="{kind}">{escape(str(goal["got"]))}</td>'
            f'<td class="left note">{escape(goal["reason"] or "")}</td></tr>'
        )
    rows.append("</table>")
    return "".join(rows)


def swaps(report):
    rows = ['<table><tr><th class="left">version</th><th class="left">cause</th><th>after request</th>'
            "<th>in flight</th><th>gate before</th><th>gate after</th><th>stall</th></tr>"]
    for s in report["swaps"]:
        rows.append(
            f'<tr><td class="left">{escape(s["version"])}</td>'
            f'<td class="left">{escape(s["cause"] or "publish")}</td><td>{s["after_request"]}</td>'
            f"<td>{s['requests_in_flight']}</td>"
            f"<td>{number(s['gate_before'], 3)}</td><td>{number(s['gate_after'], 3)}</td>"
            f"<td>{s['stall_ms']:.1f} ms</td></tr>"
        )
    rows.append("</table>")
    return "".join(rows)


def run_facts(report):
    machine = report["machine"]
    steps = ", ".join(f"{name} {s:.0f} s" for name, s in report["seconds_by_step"].items())
    yield "machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; load before the run {machine['load_before']}"
    yield "time", f"{report['seconds'] / 60:.1f} minutes: {steps}"
    speed = report["training_tokens"] / report["training_seconds"] if report["training_seconds"] else 0
    yield "training", f"{report['training_tokens']} tokens in {report['training_seconds']:.0f} s ({speed:.0f} tokens/s, beside other work)"
    settings = report["settings"]
    yield "traffic", (
        f"bursts of {settings['burst']} requests, {settings['concurrency']} at a time, drafts of"
        f" {report['live_draft_length']}: streams that run together verify many rows, so shorter drafts pay"
    )
    for phase in report["phases"]:
        sent = phase["last_request"] - phase["first_request"] + 1
        cut = f" ({phase['cut']})" if phase["cut"] else ""
        yield phase["name"], f"{sent} requests at temperature {phase['temperature']:g} in {phase['seconds']:.0f} s{cut}"


def definition_list(pairs):
    return "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs)


def percent(value):
    return "--" if value is None else f"{100 * value:.0f} %"


def number(value, digits):
    return "--" if value is None else f"{value:.{digits}f}"


def times(value):
    return "--" if value is None else f"{value:.2f} ×"


def millions(value):
    return f"{value / 1e6:.1f} M"


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".html").write_text(page(json.loads(source.read_text())))
    print(source.with_suffix(".html"))
