"""The whole demo against stand-ins of the three programs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).parent
RUN = HERE.parent / "run.py"
SMALL = ["--requests", "24", "--again", "12", "--sampled", "6", "--burst", "12", "--held-out", "4"]

REQUIRED = {"target", "target_params", "draft_params", "domains", "swaps", "requests",
            "failed_requests", "output_mismatches", "training_tokens", "training_seconds"}
REQUIRED_OF_DOMAIN = {"name", "acceptance_static", "acceptance_adapted", "mean_length_static",
                      "mean_length_adapted", "tokens_per_s_plain", "tokens_per_s_static",
                      "tokens_per_s_adapted"}
REQUIRED_OF_SWAP = {"version", "stall_ms", "gate_before", "gate_after"}


class Demo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name) / "demo"

    def start(self, *more, fault=None):
        command = [sys.executable, str(RUN), "--binaries", str(HERE / "fake"), "--model", str(RUN)]
        environment = {**os.environ, **({"FAKE_FAULT": fault} if fault else {})}
        process = subprocess.Popen([*command, "--out", str(self.out), *SMALL, *more],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env=environment)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process

    def run_demo(self, *more, fault=None):
        process = self.start(*more, fault=fault)
        output, _ = process.communicate(timeout=900)
        return process.returncode, output

    def report(self):
        return json.loads((self.out / "report.json").read_text())

    def left_behind(self):
        """Programs that still run with this test's folder on their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.out) in line:
                found.append(line)
        return found

    def test_the_loop_ends_with_a_report(self):
        code, output = self.run_demo()
        self.assertEqual(code, 0, output)
        report = self.report()
        self.assertLessEqual(REQUIRED, report.keys())
        self.assertEqual([d["name"] for d in report["domains"]], ["arithmetic", "sql"])
        for domain in report["domains"]:
            self.assertLessEqual(REQUIRED_OF_DOMAIN, domain.keys())
            self.assertGreater(domain["acceptance_adapted"], domain["acceptance_static"])
        self.assertGreaterEqual(len(report["swaps"]), 3)
        for swap in report["swaps"]:
            self.assertLessEqual(REQUIRED_OF_SWAP, swap.keys())
        self.assertEqual(report["requests"], 24 + 24 + 12 + 6)
        self.assertEqual(report["failed_requests"], 0, report["failures"])
        self.assertEqual(report["output_mismatches"], 0, report["mismatches"])
        page = (self.out / "report.html").read_text()
        self.assertEqual(page.count('class="line d0"'), 3, "two phases and the legend")
        self.assertNotIn("http://", page)
        self.assertNotIn("https://", page)
        self.assertIn(str(self.out / "report.html"), output)
        self.assertEqual(self.left_behind(), [])

    def test_a_step_that_fails_ends_the_run_with_the_reason(self):
        code, output = self.run_demo(fault="build")
        self.assertEqual(code, 1, output)
        self.assertIn("truncated file", output)
        self.assertFalse((self.out / "report.json").exists())
        self.assertEqual(self.left_behind(), [])

    def test_failed_requests_are_counted_and_missed_goals_fail_only_strict_runs(self):
        code, output = self.run_demo("--strict", fault="mismatch")
        self.assertEqual(code, 2, output)
        self.assertEqual(self.report()["output_mismatches"], 1)
        self.assertIn("FELL SHORT  output mismatches", output)

    def test_a_sidecar_that_does_not_learn_is_reported(self):
        code, output = self.run_demo("--learn-seconds", "1", fault="deaf")
        self.assertEqual(code, 0, output)
        report = self.report()
        self.assertTrue(report["unlearned"])
        missed = {miss["name"] for miss in report["misses"]}
        self.assertIn("swaps", missed)
        self.assertIn("arithmetic: gain over the static draft", missed)

    def test_an_interrupt_leaves_no_process_behind(self):
        process = self.start()
        deadline = time.monotonic() + 300
        # As the last program starts, which is when an interrupt could lose track of it.
        while not (self.out / "da-sidecar.log").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertTrue((self.out / "da-sidecar.log").exists())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        self.assertEqual(process.returncode, 130)
        self.assertEqual(self.left_behind(), [])


if __name__ == "__main__":
    unittest.main()
