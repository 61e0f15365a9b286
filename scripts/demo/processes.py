"""The demo's child processes: started with a log, waited for by their own words, always stopped."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PR_SET_PDEATHSIG = 1


class StepFailed(Exception):
    """A step of the demo cannot go on. The message says what to look at."""


class Child:
    """One running program. Everything it prints goes to its log."""

    def __init__(self, name, command, log, environment):
        self.name = name
        self.log = Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C reaches this program alone, which then stops the children in order.
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    def text(self):
        return ANSI.sub("", self.log.read_text(errors="replace"))

    def wait_for(self, pattern, seconds):
        """Waits until the log matches; returns the match."""
        deadline = time.monotonic() + seconds
        while True:
            # Asked for first: what a program that just ended printed last still counts.
            running = self.process.poll() is None
            found = re.search(pattern, self.text())
            if found:
                return found
            if not running:
                raise StepFailed(self.ended())
            if time.monotonic() > deadline:
                raise StepFailed(f"{self.name} was not ready within {seconds:.0f} s; see {self.log}")
            time.sleep(0.1)

    def check(self):
        """Raises when the program has ended by itself."""
        if self.process.poll() is not None:
            raise StepFailed(self.ended())

    def ended(self):
        last = "\n".join("    " + line for line in self.text().splitlines()[-12:])
        code = self.process.returncode
        return f"{self.name} ended with exit code {code}; the end of {self.log}:\n{last}"

    def ask_to_stop(self):
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self, seconds=20):
        self.ask_to_stop()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    """All child processes of a run, as a context that leaves none behind."""

    def __init__(self, logs):
        self.logs = Path(logs)
        self.children = []
        self.environment = {**os.environ, "NO_COLOR": "1"}

    def start(self, name, command):
        # An interrupt between the start and the entry in the list would leave the child behind.
        with Uninterrupted():
            child = Child(name, command, self.logs / f"{name}.log", self.environment)
            self.children.append(child)
        return child

    def run(self, name, command, seconds, on_line=lambda line: None):
        """Runs a program to its end; returns what it printed. Lines are passed on as they come."""
        child = self.start(name, command)
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            ended = child.process.poll() is not None
            lines = child.text().splitlines(keepends=True)
            for line in lines[seen:]:
                if line.endswith("\n"):
                    seen += 1
                    on_line(line.rstrip())
            if ended:
                break
            if time.monotonic() > deadline:
                raise StepFailed(f"{name} did not end within {seconds:.0f} s; see {child.log}")
            time.sleep(0.2)
        self.children.remove(child)
        if child.process.returncode != 0:
            raise StepFailed(child.ended())
        return child.text()

    def stop(self, child):
        child.stop()
        self.children.remove(child)

    def check(self):
        for child in self.children:
            child.check()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A second Ctrl-C must not leave orphans either.
        with Uninterrupted():
            # Newest first: the sidecar lets go of the server before the server goes.
            for child in reversed(self.children):
                child.stop()
            self.children.clear()


class Uninterrupted:
    """Puts SIGINT and SIGTERM off until the block has ended.

    By handlers rather than by the signal mask, which the child would inherit.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.arrived = []
        note = lambda number, _: self.arrived.append(number)
        self.previous = {number: signal.signal(number, note) for number in self.SIGNALS}

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        for number in self.arrived:
            signal.raise_signal(number)


def die_with_parent():
    """Runs in the child before it executes: ends it when this program is killed outright."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
