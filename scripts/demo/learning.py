"""Watching the sidecar learn, over its `/status`."""

import time

from api import fetch_json

POLL_SECONDS = 0.5


class Learning:
    """What the sidecar at `admin` says of itself."""

    def __init__(self, admin):
        self.admin = admin

    def status(self):
        return fetch_json(f"{self.admin}/status")

    def phase(self):
        """What the trainer is at; None when the sidecar does not say."""
        try:
            return self.status()["trainer"].get("phase")
        except OSError:
            return None

    def wait(self, sent, seconds, left=0, check=lambda: None):
        """Waits until all but `left` samples of what was captured of `sent` requests are learned.

        Returns whether that came true within `seconds`. `check` may raise to end the wait.
        """
        deadline = time.monotonic() + seconds
        quiet = 0
        while time.monotonic() < deadline:
            check()
            quiet = quiet + 1 if learned(self.status(), sent, left) else 0
            # Twice in a row, because capture, scoring and rounds hand over between two looks.
            if quiet >= 2:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def describe(self):
        """One line for a person."""
        try:
            status = self.status()
        except OSError:
            return "sidecar: not answering"
        trainer, store = status["trainer"], status["store"]
        phase = trainer.get("phase", "?")
        if phase == "training" and trainer.get("samples"):
            loss = trainer.get("loss")
            phase = f"training step {trainer.get('steps')}"
            phase += f" loss {loss:.2f}" if loss is not None else ""
        running = next((v for v in status["versions"] if v["state"] == "running"), None)
        gate = (running or {}).get("gate")
        held_out = f", gate {gate['before']:.2f} to {gate['after']:.2f}" if gate else ""
        return (
            f"draft {status['running']}{held_out} | {phase} | samples {store.get('samples', 0)},"
            f" scored {store.get('scored', 0)}, learned {store.get('learned', 0)}"
        )


def settled(counters):
    """Requests to learn from that capture has dealt with, one way or the other."""
    return counters["captured"] + sum(counters["dropped"].values())


def learned(status, sent, left=0):
    store = status["store"]
    if settled(status["counters"]) < sent or "samples" not in store:
        return False
    held_out = store["held_out"]
    # More may have come in since.
    wanted = min(store["samples"], sent)
    return (
        status["trainer"].get("phase") == "waiting"
        and store["scored"] >= wanted
        and store["learned"] >= wanted - held_out - left
    )
