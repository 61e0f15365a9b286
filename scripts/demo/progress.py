"""Live progress in the terminal: one line that is redrawn, or a line now and then into a log."""

import sys
import threading
import time

REDRAW_SECONDS = 0.5
LOG_SECONDS = 10


class Progress:
    """Prints steps, and below them what `describe()` says right now."""

    def __init__(self, out=sys.stdout):
        self.out = out
        self.live = out.isatty()
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.describe = None
        self.shown = False
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def clock(self):
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60:2d}:{seconds % 60:02d}"

    def step(self, text):
        """Something began or ended: stays on the screen."""
        with self.lock:
            self.clear()
            print(f"{self.clock()}  {text}", file=self.out, flush=True)

    def watch(self, describe):
        """From now on shows what `describe()` returns; None ends it."""
        with self.lock:
            self.describe = describe
            self.clear()

    def clear(self):
        if self.shown:
            self.out.write("\r\x1b[K")
            self.shown = False

    def run(self):
        while not self.stopped.wait(REDRAW_SECONDS if self.live else LOG_SECONDS):
            describe = self.describe
            if describe is None:
                continue
            text = describe()
            with self.lock:
                if self.describe is not describe or not text:
                    continue
                if self.live:
                    self.out.write(f"\r\x1b[K       {text}"[:150])
                    self.out.flush()
                    self.shown = True
                else:
                    print(f"{self.clock()}  {text}", file=self.out, flush=True)

    def close(self):
        self.stopped.set()
        self.thread.join()
        with self.lock:
            self.clear()
            self.out.flush()


def percent(value):
    return "--" if value is None else f"{100 * value:.0f} %"
