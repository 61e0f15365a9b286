"""The demo's client: the official `openai` package, unchanged, over any OpenAI-compatible server."""

import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import openai

DOMAIN_HEADER = "x-draft-adapter-domain"
OPT_OUT_HEADER = "x-draft-adapter-no-train"


@dataclass
class Answer:
    """One request and what came back. `error` is None when it went well."""

    prompt: str
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    """Seconds since the epoch."""
    error: str = None


class Client:
    def __init__(self, base, max_tokens):
        self.max_tokens = max_tokens
        # A request that fails is a finding, so nothing is tried again behind the demo's back.
        self.client = openai.OpenAI(
            base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=180
        )
        self.model = self.client.models.list().data[0].id

    def ask(self, prompt, domain=None, temperature=0.0, seed=None, learn=True):
        """Asks one thing; the sidecar keeps nothing of it where `learn` is false."""
        answer = Answer(prompt)
        headers = {DOMAIN_HEADER: domain} if domain else {}
        if not learn:
            headers[OPT_OUT_HEADER] = "1"
        started = time.monotonic()
        try:
            response = self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=self.max_tokens,
                temperature=temperature,
                seed=seed,
                extra_headers=headers,
            )
            answer.text = response.choices[0].message.content or ""
            answer.tokens = response.usage.completion_tokens
            if answer.tokens == 0:
                answer.error = "the answer is empty"
        except openai.OpenAIError as error:
            answer.error = f"{type(error).__name__}: {error}"[:300]
        answer.seconds = time.monotonic() - started
        answer.ended = time.time()
        return answer

    def send(self, prompts, concurrency, domain=None, temperature=0.0, seed=None):
        """Sends all prompts, `concurrency` at a time, and yields answers as they come."""
        with ThreadPoolExecutor(concurrency) as pool:
            asked = [
                pool.submit(
                    self.ask, prompt, domain, temperature, None if seed is None else seed + i
                )
                for i, prompt in enumerate(prompts)
            ]
            try:
                for future in as_completed(asked):
                    yield future.result()
            finally:
                # Leaving early (an error, Ctrl-C) must not wait for what has not begun.
                for future in asked:
                    future.cancel()
