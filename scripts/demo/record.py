"""Everything the demo measures while it runs, as plain data."""

import time
from dataclasses import dataclass, field


@dataclass
class Phase:
    name: str
    domain: str
    prompts: list
    temperature: float
    first_request: int = 0
    last_request: int = 0
    seconds: float = 0.0
    cut: str = None
    """Why fewer requests were sent than planned; None when all were."""

    @property
    def label(self):
        return self.name if self.temperature == 0 else f"{self.name}, temperature {self.temperature}"


class Texts:
    """Answers at temperature 0 by prompt: whatever drafted them, they must be the same."""

    def __init__(self):
        self.seen = {}

    def add(self, prompt, text, where):
        self.seen.setdefault(prompt, {}).setdefault(text, where)

    def mismatches(self):
        return [
            {"prompt": prompt, "answers": [{"from": where, "text": t} for t, where in texts.items()]}
            for prompt, texts in self.seen.items()
            if len(texts) > 1
        ]


@dataclass
class Record:
    draft_length: int = 0
    """Of the comparison, where one stream runs at a time."""
    live_draft_length: int = 0
    """Of the engine that serves the traffic."""
    plan: dict = field(default_factory=dict)
    curve: dict = field(default_factory=dict)
    phases: list = field(default_factory=list)
    windows: list = field(default_factory=list)
    """Acceptance over a few requests each, in order."""
    checkpoints: list = field(default_factory=list)
    """Held-out acceptance of both domains after a phase."""
    spans: list = field(default_factory=list)
    """Begin and end of each traffic request, in seconds since the epoch."""
    repeats: list = field(default_factory=list)
    """The same of requests that were sent again and kept from learning."""
    failures: list = field(default_factory=list)
    texts: Texts = field(default_factory=Texts)
    unlearned: list = field(default_factory=list)
    """Waits for the sidecar that ran into their bound."""
    results: dict = field(default_factory=dict)
    """Held-out comparison: domain, then server, then `evaluate.Result`."""
    status: dict = field(default_factory=dict)
    """The sidecar's last `/status`."""
    traffic_seconds: float = 0.0
    steps: dict = field(default_factory=dict)
    """Seconds by step."""

    def timed(self, step):
        return Timed(self, step)


class Timed:
    def __init__(self, record, step):
        self.record, self.step = record, step

    def __enter__(self):
        self.started = time.monotonic()

    def __exit__(self, *_):
        spent = time.monotonic() - self.started
        self.record.steps[self.step] = self.record.steps.get(self.step, 0.0) + spent
