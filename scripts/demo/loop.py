"""The live part of the demo: traffic in phases, learning between bursts, held-out checkpoints."""

import threading
import time

from api import Counters
from processes import StepFailed
from progress import percent
from stack import ROUND_SAMPLES

WINDOW = 10
"""Requests of one point of the acceptance line."""

TRICKLE_SECONDS = 1.5
"""Between an answer and the next request while the sidecar learns."""

SWAPPING = "publishing"
"""Phase of the sidecar's trainer that ends in a swap."""

PAUSE_SECONDS = 0.02
"""Between two looks at the phase."""


class Loop:
    """Sends the phases through the sidecar and watches what it makes of them."""

    def __init__(self, settings, record, stack, progress, client, engine, learning, deadline):
        self.settings = settings
        self.record = record
        self.stack = stack
        self.progress = progress
        self.client = client
        self.engine = engine
        self.learning = learning
        self.deadline = deadline
        self.sent = 0
        self.acceptance = None

    def run(self, phase):
        record, settings = self.record, self.settings
        record.phases.append(phase)
        phase.first_request = self.sent + 1
        started = time.monotonic()
        self.progress.step(
            f"{phase.label}: {len(phase.prompts)} requests, {settings.concurrency} at a time"
        )
        before = self.sent
        self.progress.watch(
            lambda: f"{phase.name} {self.sent - before}/{len(phase.prompts)} requests |"
            f" acceptance {percent(self.acceptance)} | {self.learning.describe()}"
        )
        left = list(phase.prompts)
        while left:
            # Even a machine without time sees one burst of each phase.
            if self.sent > before and time.monotonic() > self.deadline:
                phase.cut = f"{len(left)} requests were not sent: the time for traffic was used up"
                break
            with record.timed("traffic"):
                burst = [left.pop(0) for _ in range(min(settings.burst, len(left)))]
                self.send(phase, burst, settings.concurrency)
            with record.timed("learning between bursts"):
                self.catch_up(phase, left)
        self.progress.watch(None)
        phase.last_request = self.sent
        phase.seconds = time.monotonic() - started
        if phase.cut:
            self.progress.step(f"{phase.label}: {phase.cut}")

    def send(self, phase, prompts, concurrency):
        """Sends prompts at once and records what comes of them."""
        counters, since = Counters.read(self.engine), self.sent
        seed = self.settings.seed + since
        answers = self.client.send(prompts, concurrency, phase.domain, phase.temperature, seed)
        for done, answer in enumerate(answers, 1):
            self.take(phase, answer)
            if done % WINDOW == 0 or done == len(prompts):
                now = Counters.read(self.engine)
                self.window(phase, since, now - counters)
                counters, since = now, self.sent

    def take(self, phase, answer):
        self.sent += 1
        self.record.spans.append((answer.ended - answer.seconds, answer.ended))
        self.note(phase, answer, f"request {self.sent}")

    def note(self, phase, answer, name):
        """Records a failure, or a text to compare with others of the same prompt."""
        if answer.error:
            self.record.failures.append({"request": name, "error": answer.error})
            self.stack.children.check()
        elif phase.temperature == 0:
            self.record.texts.add(answer.prompt, answer.text, name)

    def catch_up(self, phase, prompts):
        """Lets the sidecar learn the burst while a few of `prompts` trickle in, one at a time.

        While it publishes, prompts that were sent before are asked again without a pause, and not
        learned from: a swap must meet requests in flight, as it does in a server that is never
        quite idle. To do so while it judges would keep it from judging.
        """
        settings = self.settings
        burst_end = self.sent
        bound = min(settings.learn_seconds, max(5, self.deadline - time.monotonic()))
        # What is left at the end of a phase should not wait for the next one.
        leave = ROUND_SAMPLES - 1 if prompts else 0
        stop = threading.Event()
        answers, repeats, counters = [], [], []

        def ask(prompt, learn):
            seed = settings.seed + self.sent
            return self.client.ask(prompt, phase.domain, phase.temperature, seed, learn)

        def trickle():
            due = time.monotonic() + TRICKLE_SECONDS
            while not stop.wait(PAUSE_SECONDS):
                if self.learning.phase() == SWAPPING:
                    repeats.append(ask(phase.prompts[len(repeats) % settings.burst], learn=False))
                elif time.monotonic() > due and prompts and len(answers) < settings.trickle:
                    before = Counters.read(self.engine)
                    answers.append(ask(prompts.pop(0), learn=True))
                    counters.append(Counters.read(self.engine) - before)
                    due = time.monotonic() + TRICKLE_SECONDS

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            learned = self.learning.wait(burst_end, bound, leave, self.stack.children.check)
        finally:
            stop.set()
            thread.join()
        for answer in answers:
            self.take(phase, answer)
        for answer in repeats:
            self.note(phase, answer, f"repeat after request {burst_end}")
            self.record.repeats.append((answer.ended - answer.seconds, answer.ended))
        if counters:
            self.window(phase, burst_end, sum(counters, Counters()))
        if not learned:
            self.record.unlearned.append(
                f"after request {burst_end} ({phase.name}) the sidecar had not learned"
                f" everything within {bound:.0f} s"
            )

    def window(self, phase, since, counters):
        acceptance = counters.acceptance(self.record.live_draft_length)
        if acceptance is None:
            return
        self.acceptance = acceptance
        self.record.windows.append(
            {
                "phase": len(self.record.phases) - 1,
                "domain": phase.domain,
                "from_request": since + 1,
                "to_request": self.sent,
                "acceptance": acceptance,
                "accepted_share": counters.accepted_share(),
                "mean_length": counters.mean_length(),
                "drafted": counters.drafted,
            }
        )

    def checkpoint(self, phase, client, engine, held_out):
        """Held-out acceptance of the running version, on an engine without other traffic."""
        version = self.learning.status()["running"]
        self.stack.swap(engine, version)
        point = {"after": phase.label, "request": self.sent, "version": version, "domains": {}}
        for domain, prompts in held_out.items():
            before = Counters.read(engine)
            for answer in client.send(prompts, self.settings.concurrency):
                if answer.error:
                    raise StepFailed(f"a held-out request failed: {answer.error}")
                self.record.texts.add(answer.prompt, answer.text, f"checkpoint {version}")
            counters = Counters.read(engine) - before
            point["domains"][domain] = counters.acceptance(self.record.draft_length)
        self.record.checkpoints.append(point)
        scores = ", ".join(f"{name} {percent(a)}" for name, a in point["domains"].items())
        self.progress.step(f"{phase.label} done, {version} on held-out prompts: {scores}")
