"""Charts of the report as inline SVG. Colours come from the page's CSS variables."""

from html import escape

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 34, 52


class Axes:
    """Maps request numbers and acceptance to pixels."""

    def __init__(self, most):
        self.most = max(1, most)

    def x(self, request):
        return LEFT + (WIDTH - LEFT - RIGHT) * request / self.most

    def y(self, acceptance):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * acceptance


def acceptance_chart(report):
    """Acceptance over traffic: a line per domain, swaps marked, phases shaded."""
    axes = Axes(report["requests"])
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Acceptance over traffic, with swaps marked, one line per domain">'
    ]
    parts += phases(report, axes)
    parts += grid(axes)
    parts += swaps(report, axes)
    for index, domain in enumerate(report["domains"]):
        parts += live_line(report, axes, domain["name"], index)
        parts += checkpoints(report, axes, domain, index)
    parts.append("</svg>")
    return "".join(parts)


def phases(report, axes):
    parts = []
    order = [d["name"] for d in report["domains"]]
    for phase in report["phases"]:
        if phase["last_request"] < phase["first_request"]:
            continue
        left, right = axes.x(phase["first_request"] - 1), axes.x(phase["last_request"])
        index = order.index(phase["domain"]) if phase["domain"] in order else 0
        # A narrow band has no room for more than the domain.
        label = phase["name"] if right - left > 9 * len(phase["name"]) else phase["domain"]
        title = f"{phase['name']}: requests {phase['first_request']} to {phase['last_request']}"
        title += f", temperature {phase['temperature']}"
        parts.append(
            f'<rect class="phase d{index}" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(title)}</title></rect>'
        )
        second = f"T {phase['temperature']:g}"
        parts.append(
            f'<text class="phase-name" x="{(left + right) / 2:.1f}" y="14">{escape(label)}</text>'
            f'<text class="phase-name faint" x="{(left + right) / 2:.1f}" y="28">{second}</text>'
        )
    return parts


def grid(axes):
    parts = []
    for tenth in range(0, 11, 2):
        y = axes.y(tenth / 10)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{tenth * 10}%</text>')
    step = nice_step(axes.most)
    for request in range(0, axes.most + 1, step):
        parts.append(
            f'<text class="tick" x="{axes.x(request):.1f}" y="{HEIGHT - BOTTOM + 32}">{request}</text>'
        )
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">requests answered</text>'
    )
    return parts


def nice_step(most):
    for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000):
        if most / step <= 10:
            return step
    return most // 10


def swaps(report, axes):
    parts = []
    last = -100.0
    for swap in report["swaps"]:
        x = axes.x(swap["after_request"])
        name = swap["version"].lstrip("v").lstrip("0") or "0"
        kind = "taken-back" if swap["cause"] == "rollback" else ""
        title = f"{swap['version']} after request {swap['after_request']}"
        if swap["gate_after"] is not None:
            title += f": gate {swap['gate_before']:.3f} to {swap['gate_after']:.3f}"
        title += f", stall {swap['stall_ms']:.1f} ms ({swap['cause'] or 'publish'})"
        parts.append(
            f'<g class="swap {kind}"><title>{escape(title)}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM + 4}"/>'
            f'<path d="M{x - 4:.1f} {HEIGHT - BOTTOM + 10} l4 -7 l4 7 z"/>'
        )
        # A label that would run into the one before is left to the tooltip.
        if x - last >= 22:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}">v{escape(name)}</text>')
            last = x
        parts.append("</g>")
    return parts


def live_line(report, axes, name, index):
    parts, previous = [], None
    for number, phase in enumerate(report["phases"]):
        points = [
            ((w["from_request"] + w["to_request"] - 1) / 2, w)
            for w in report["timeline"]
            if w["phase"] == number and phase["domain"] == name
        ]
        if not points:
            continue
        place = [(axes.x(request), axes.y(w["acceptance"])) for request, w in points]
        if previous:
            parts.append(f'<path class="gap d{index}" d="{path([previous, place[0]])}"/>')
        dash = " sampled" if phase["temperature"] else ""
        parts.append(f'<path class="line d{index}{dash}" d="{path(place)}"/>')
        for (x, y), (_, w) in zip(place, points):
            title = f"{name}, requests {w['from_request']} to {w['to_request']}: "
            title += f"{100 * w['acceptance']:.0f} % accepted, mean length {w['mean_length']:.2f}"
            parts.append(
                f'<circle class="dot d{index}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(title)}</title></circle>"
            )
        previous = place[-1]
    return parts


def checkpoints(report, axes, domain, index):
    """Held-out acceptance: the static draft before any traffic, then after each phase."""
    name = domain["name"]
    points = [(0, domain["acceptance_static"], "static draft v0")]
    points += [(c["request"], c["domains"].get(name), c["version"]) for c in report["checkpoints"]]
    points.append((report["requests"], domain["acceptance_adapted"], "adapted draft at the end"))
    parts = []
    for request, value, label in points:
        if value is None:
            continue
        x, y = axes.x(request), axes.y(value)
        title = f"{name}, held-out prompts, {label}: {100 * value:.0f} % accepted"
        parts.append(
            f'<path class="held-out d{index}" d="M{x:.1f} {y - 6:.1f} l6 6 l-6 6 l-6 -6 z">'
            f"<title>{escape(title)}</title></path>"
        )
    return parts


def path(points):
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


SMALL_WIDTH, SMALL_HEIGHT = 460, 200


def bar_chart(report):
    """Tokens per second of the three servers, by domain."""
    rows = []
    most = max(
        [d[f"tokens_per_s_{s}"] or 0 for d in report["domains"] for s in ("plain", "static", "adapted")]
        + [1e-9]
    )
    y = 8
    for index, d in enumerate(report["domains"]):
        rows.append(f'<text class="tick start strong" x="0" y="{y + 10}">{escape(d["name"])}</text>')
        y += 18
        for server in ("plain", "static", "adapted"):
            value = d[f"tokens_per_s_{server}"] or 0
            width = (SMALL_WIDTH - 166) * value / most
            label = f"{value:.1f} tokens/s"
            rows.append(
                f'<text class="tick start" x="0" y="{y + 12}">{server}</text>'
                f'<rect class="bar {server} d{index}" x="62" y="{y}" width="{width:.1f}" height="16" rx="2"/>'
                f'<text class="tick start" x="{62 + width + 6:.1f}" y="{y + 12}">{label}</text>'
            )
            y += 21
        y += 10
    return (
        f'<svg class="chart" viewBox="0 0 {SMALL_WIDTH} {y}" role="img" '
        f'aria-label="Tokens per second">{"".join(rows)}</svg>'
    )


def cost_chart(report):
    """What a forward of 1, 2, ... rows costs the target."""
    curve = report["cost_curve"]
    verify, k = curve["verify_ms"], curve["chosen_k"]
    most = max(verify)
    digits = 1 if most < 20 else 0
    left, bottom, top = 40, 34, 16
    wide = (SMALL_WIDTH - left - 10) / len(verify)
    tall = SMALL_HEIGHT - bottom - top
    rows = []
    for index, ms in enumerate(verify):
        height = tall * ms / most
        x, y = left + index * wide, top + tall - height
        chosen = " chosen" if index == k else ""
        rows.append(
            f'<rect class="cost{chosen}" x="{x + 3:.1f}" y="{y:.1f}" width="{wide - 6:.1f}" '
            f'height="{height:.1f}" rx="2"><title>{index + 1} rows: {ms:.2f} ms</title></rect>'
            f'<text class="tick" x="{x + wide / 2:.1f}" y="{y - 4:.1f}">{ms:.{digits}f}</text>'
            f'<text class="tick" x="{x + wide / 2:.1f}" y="{SMALL_HEIGHT - bottom + 15}">{index + 1}</text>'
        )
    rows.append(
        f'<text class="tick" x="{SMALL_WIDTH / 2}" y="{SMALL_HEIGHT - 3}">'
        f"rows in one target forward; {k + 1} verify k = {k}</text>"
        f'<text class="tick end" x="{left - 6}" y="{top + 4}">ms</text>'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {SMALL_WIDTH} {SMALL_HEIGHT}" role="img" '
        f'aria-label="Cost of verification">{"".join(rows)}</svg>'
    )
