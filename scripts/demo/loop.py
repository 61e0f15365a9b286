"""The live part of the demo: traffic in phases, learning between bursts, held-out checkpoints."""

import time

from api import Counters
from processes import StepFailed
from progress import percent
from stack import ROUND_SAMPLES

WINDOW = 10
"""Requests of one point of the acceptance line."""


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
        for start in range(0, len(phase.prompts), settings.burst):
            if time.monotonic() > self.deadline:
                left = len(phase.prompts) - start
                phase.cut = f"{left} requests were not sent: the time for traffic was used up"
                break
            with record.timed("traffic"):
                self.burst(phase, phase.prompts[start : start + settings.burst])
            with record.timed("waiting for learning"):
                # Between bursts, less than a round may wait for the next one.
                last = start + settings.burst >= len(phase.prompts)
                self.catch_up(phase, 0 if last else ROUND_SAMPLES - 1)
        self.progress.watch(None)
        phase.last_request = self.sent
        phase.seconds = time.monotonic() - started
        if phase.cut:
            self.progress.step(f"{phase.label}: {phase.cut}")

    def burst(self, phase, prompts):
        settings, record = self.settings, self.record
        counters = Counters.read(self.engine)
        answers = self.client.send(
            prompts, settings.concurrency, phase.domain, phase.temperature, settings.seed
        )
        since = self.sent
        for done, answer in enumerate(answers, 1):
            self.sent += 1
            record.ended.append(answer.ended)
            if answer.error:
                record.failures.append({"request": self.sent, "error": answer.error})
                self.stack.children.check()
            elif phase.temperature == 0:
                record.texts.add(answer.prompt, answer.text, f"request {self.sent}")
            if done % WINDOW == 0 or done == len(prompts):
                now = Counters.read(self.engine)
                self.window(phase, since, now - counters)
                counters, since = now, self.sent

    def window(self, phase, since, counters):
        acceptance = counters.acceptance(self.record.draft_length)
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

    def catch_up(self, phase, left):
        bound = min(self.settings.learn_seconds, max(5, self.deadline - time.monotonic()))
        if not self.learning.wait(self.sent, bound, left, self.stack.children.check):
            self.record.unlearned.append(
                f"after request {self.sent} ({phase.name}) the sidecar had not learned"
                f" everything within {bound:.0f} s"
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
