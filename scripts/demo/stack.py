"""The three programs of the project as the demo starts them."""

import json
from pathlib import Path

from api import fetch_json
from processes import StepFailed

LISTENING = r"listening on (http://\S+)"
ANY_PORT = "127.0.0.1:0"
START_SECONDS = 120
BUILD_SECONDS = 420

ROUND_SAMPLES = 16

SIDECAR_SETTINGS = {
    # Small rounds, so that a few minutes of traffic show several versions.
    "learn.round_samples": str(ROUND_SAMPLES),
    # Longer than a burst, so that no round of two or three samples begins during one; the rest of
    # a phase is less than a round and waits this long.
    "learn.round_max_wait_seconds": "25",
    "upstream.poll_seconds": "1",
    # Decides how strongly the trainer competes with the server for the two cores.
    "trainer.nice": "10",
}
"""Where the demo differs from the sidecar's defaults."""


class Stack:
    """Starts programs from `binaries` for the target `model`, with all files under `out`."""

    def __init__(self, children, binaries, model, out):
        self.children = children
        self.binaries = Path(binaries)
        self.model = str(model)
        self.out = Path(out).absolute()
        self.draft = self.out / "draft-v0"
        self.work = self.out / "work"

    def plan(self, options):
        """Sizes of target and draft, before anything is built."""
        command = [self.binaries / "da-build", "--model", self.model, "--output", self.draft]
        text = self.children.run(
            "da-build-plan", [*command, *options, "--dry-run", "--json"], START_SECONDS
        )
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    def build(self, options, on_line):
        command = [self.binaries / "da-build", "--model", self.model, "--output", self.draft]
        self.children.run("da-build", [*command, *options], BUILD_SECONDS, on_line)

    def serve(self, name, draft, draft_length):
        """Starts an engine; returns its address. Only draft and draft length ever differ."""
        command = [self.binaries / "da-serve", "--model", self.model, "--port", "0"]
        command += ["--num-speculative-tokens", str(draft_length)]
        if draft is not None:
            command += ["--draft", draft, "--draft-root", self.out]
        child = self.children.start(name, command)
        return child, child.wait_for(LISTENING, START_SECONDS).group(1)

    def sidecar(self, upstream, draft_length, more):
        """Starts the sidecar in front of `upstream`; returns its addresses for clients and admin."""
        settings = {
            **SIDECAR_SETTINGS,
            "train.num_speculative_tokens": str(draft_length),
            **more,
        }
        command = [self.binaries / "da-sidecar", "--work-dir", self.work]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        command += ["run", "--upstream", upstream, "--draft", self.draft]
        command += ["--listen", ANY_PORT, "--admin", ANY_PORT]
        child = self.children.start("da-sidecar", command)
        addresses = []
        for role in ("clients", "metrics, probes, status"):
            found = child.wait_for(rf"{role}\s+address=(\S+)", START_SECONDS)
            addresses.append(f"http://{found.group(1)}")
        return addresses

    def control(self, command):
        """One of the sidecar's client commands, such as `pause`."""
        program = [self.binaries / "da-sidecar", "--work-dir", self.work, command]
        return self.children.run(f"da-sidecar-{command}", program, START_SECONDS)

    def swap(self, base, version):
        """Makes the engine at `base` run a version of the sidecar's."""
        path = self.work / "drafts" / version
        try:
            body = {"path": str(path), "version": version}
            return fetch_json(f"{base}/v1/draft_adapter/draft", body, timeout=120)
        except OSError as error:
            raise StepFailed(f"the engine does not take {version}: {error}") from error
