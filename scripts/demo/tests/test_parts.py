"""The demo's parts: prompts, counters, costs, and what counts as learned."""

import io
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import cost
import evaluate
import learning
import prompts
from api import Counters
from progress import Progress
from record import Texts
from traffic import Answer


class Prompts(unittest.TestCase):
    def test_splits_never_share_a_prompt_whatever_the_seed(self):
        for domain in prompts.DOMAINS:
            train = set(prompts.prompts(domain, "train", None, 1))
            held_out = set(prompts.prompts(domain, "held-out", None, 2))
            self.assertGreaterEqual(len(train), 300)
            self.assertGreaterEqual(len(train) + len(held_out), 330)
            self.assertFalse(train & held_out)

    def test_a_seed_decides_the_order_and_nothing_else_does(self):
        once = prompts.prompts("sql", "train", 50, 7)
        self.assertEqual(once, prompts.prompts("sql", "train", 50, 7))
        self.assertNotEqual(once, prompts.prompts("sql", "train", 50, 8))
        self.assertEqual(len(set(once)), 50)

    def test_more_than_there_are_is_an_error(self):
        with self.assertRaises(ValueError):
            prompts.prompts("sql", "held-out", 10_000)


METRICS = """# HELP vllm:spec_decode_num_drafts_total Verifications.
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 2
other_metric 99
"""


class CountersText(unittest.TestCase):
    def test_rates_follow_their_definitions(self):
        counters = Counters.parse(METRICS)
        self.assertAlmostEqual(counters.accepted_share(), 12 / 30)
        self.assertAlmostEqual(counters.mean_length(), 2.2)
        # Judged: 10 first tokens, 6 second ones, 4 third ones.
        self.assertAlmostEqual(counters.acceptance(3), 12 / 20)

    def test_nothing_drafted_is_no_rate(self):
        counters = Counters.parse(METRICS)
        nothing = counters - counters
        self.assertIsNone(nothing.acceptance(3))
        self.assertIsNone(nothing.accepted_share())
        self.assertIsNone(nothing.mean_length())

    def test_at_one_token_all_rates_agree(self):
        counters = Counters(drafts=8, drafted=8, accepted=5, accepted_at={0: 5})
        self.assertEqual(counters.acceptance(1), counters.accepted_share())


class Costs(unittest.TestCase):
    def test_cheap_rows_make_long_drafts(self):
        cheap = {"verify_ms": [20.0] * 9, "draft_ms": [0.1]}
        dear = {"verify_ms": [20.0 * n for n in range(1, 10)], "draft_ms": [5.0]}
        self.assertEqual(cost.best_length(cheap, 0.7), 8)
        self.assertEqual(cost.best_length(dear, 0.7), 1)
        self.assertLess(cost.speed_up(dear, 0.7, 1), 1)

    def test_many_streams_bear_shorter_drafts(self):
        curve = {"verify_ms": [20.0 + 3 * i for i in range(9)], "draft_ms": [3.0 + i / 4 for i in range(9)]}
        alone, many = (cost.best_length(curve, 0.65, streams) for streams in (1, 6))
        self.assertGreater(alone, many)
        self.assertGreater(cost.verify_ms(curve, 20), curve["verify_ms"][-1])

    def test_certain_acceptance_yields_every_token(self):
        self.assertEqual(cost.expected_tokens(1.0, 4), 5)
        self.assertEqual(cost.expected_tokens(0.0, 4), 1)


def status(**changes):
    document = {
        "store": {"samples": 40, "scored": 40, "learned": 35, "held_out": 5},
        "counters": {"captured": 40, "opted_out": 0, "dropped": {}},
        "trainer": {"phase": "waiting"},
    }
    for part, values in changes.items():
        document[part].update(values)
    return document


class Learned(unittest.TestCase):
    def test_all_captured_scored_and_learned(self):
        self.assertTrue(learning.learned(status(), 40))

    def test_each_missing_piece_counts(self):
        for changes in (
            {"counters": {"captured": 39}},
            {"store": {"scored": 39}},
            {"store": {"learned": 34}},
            {"trainer": {"phase": "gating"}},
        ):
            self.assertFalse(learning.learned(status(**changes), 40), changes)

    def test_what_came_in_since_is_not_waited_for(self):
        self.assertTrue(learning.learned(status(store={"samples": 44}, counters={"captured": 44}), 40))

    def test_less_than_a_round_may_be_left(self):
        few = status(store={"learned": 30})
        self.assertTrue(learning.learned(few, 40, left=5))
        self.assertFalse(learning.learned(few, 40, left=4))

    def test_what_was_dropped_is_not_waited_for(self):
        changes = {"counters": {"captured": 38, "dropped": {"queue_full": 2}},
                   "store": {"samples": 38, "scored": 38, "learned": 33}}
        self.assertTrue(learning.learned(status(**changes), 40))


class Comparison(unittest.TestCase):
    def test_a_changed_answer_is_found_once(self):
        texts = Texts()
        texts.add("q", "a", "plain")
        texts.add("q", "a", "static")
        self.assertEqual(texts.mismatches(), [])
        texts.add("q", "b", "adapted")
        found = texts.mismatches()
        self.assertEqual(len(found), 1)
        self.assertEqual({a["from"] for a in found[0]["answers"]}, {"plain", "adapted"})

    def test_each_server_is_first_in_turn(self):
        names = ["plain", "static", "adapted"]
        self.assertEqual({evaluate.rotated(names, turn)[0] for turn in range(3)}, set(names))

    def test_speed_leaves_out_what_failed(self):
        good = Answer("p", tokens=64, seconds=2.0)
        bad = Answer("p", tokens=0, seconds=9.0, error="timeout")
        self.assertEqual(evaluate.Result(answers=[good, bad]).tokens_per_second(), 32)


class Terminal(unittest.TestCase):
    def test_a_log_gets_steps_without_control_characters(self):
        out = io.StringIO()
        progress = Progress(out)
        progress.step("one")
        progress.close()
        self.assertEqual(out.getvalue(), " 0:00  one\n")


if __name__ == "__main__":
    unittest.main()
