"""Held-out comparison: the same prompts, one at a time, on servers that differ in their draft."""

from dataclasses import dataclass, field

from api import Counters

BLOCK = 4
"""Prompts that one server answers before the next one's turn."""


@dataclass
class Result:
    """What one server did on one domain's held-out prompts."""

    answers: list = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def tokens_per_second(self):
        """Completion tokens over the time of whole requests, reading the prompt included."""
        good = [answer for answer in self.answers if answer.error is None]
        seconds = sum(answer.seconds for answer in good)
        return sum(answer.tokens for answer in good) / seconds if seconds > 0 else None

    def errors(self):
        return [answer.error for answer in self.answers if answer.error is not None]


def compare(clients, bases, prompts, on_answer=lambda: None):
    """Asks every server every prompt at temperature 0. Returns a `Result` by server.

    Servers take turns in blocks and the order rotates, so that whatever else the machine does
    hits all of them alike. Only one server works at any time.
    """
    names = list(clients)
    results = {name: Result() for name in names}
    before = {name: Counters.read(bases[name]) for name in names}
    for turn, start in enumerate(range(0, len(prompts), BLOCK)):
        block = prompts[start : start + BLOCK]
        for name in rotated(names, turn):
            for prompt in block:
                results[name].answers.append(clients[name].ask(prompt))
                on_answer()
    for name in names:
        results[name].counters = Counters.read(bases[name]) - before[name]
    return results


def rotated(names, turn):
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def mismatches(results):
    """Prompts whose text differs between the servers: [(prompt, {server: text})]."""
    found = []
    for answers in zip(*(result.answers for result in results.values())):
        texts = {name: answer.text for name, answer in zip(results, answers)}
        if all(a.error is None for a in answers) and len(set(texts.values())) > 1:
            found.append((answers[0].prompt, texts))
    return found


def warm_up(clients):
    """First requests pay for pages and threads that later ones do not."""
    for client in clients.values():
        client.ask("Say hello.")
