"""What the demo reads from the engine and the sidecar: JSON documents and Prometheus counters."""

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)$")
POSITION = re.compile(r'position="(\d+)"')


def fetch(url, body=None, timeout=30):
    """GET, or POST of a JSON body. Raises OSError when there is no good answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if data else {}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:300]
        raise OSError(f"{url} answered {error.code}: {detail}") from error


def fetch_json(url, body=None, timeout=30):
    return json.loads(fetch(url, body, timeout))


@dataclass
class Counters:
    """Speculation counters of an engine, or their difference between two moments."""

    drafts: float = 0
    drafted: float = 0
    accepted: float = 0
    accepted_at: dict = field(default_factory=dict)

    @classmethod
    def parse(cls, text):
        counters = cls()
        for line in text.splitlines():
            found = SERIES.match(line)
            if not found:
                continue
            name, labels, value = found.groups()
            if name == DRAFTS:
                counters.drafts += float(value)
            elif name == DRAFTED:
                counters.drafted += float(value)
            elif name == ACCEPTED:
                counters.accepted += float(value)
            elif name == ACCEPTED_AT and (position := POSITION.search(labels or "")):
                at = int(position.group(1))
                counters.accepted_at[at] = counters.accepted_at.get(at, 0) + float(value)
        return counters

    @classmethod
    def read(cls, base):
        return cls.parse(fetch(f"{base}/metrics"))

    def __sub__(self, other):
        at = {
            position: count - other.accepted_at.get(position, 0)
            for position, count in self.accepted_at.items()
        }
        return Counters(
            self.drafts - other.drafts,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            at,
        )

    def __add__(self, other):
        positions = {*self.accepted_at, *other.accepted_at}
        at = {p: self.accepted_at.get(p, 0) + other.accepted_at.get(p, 0) for p in positions}
        return Counters(
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            at,
        )

    def judged(self, k):
        """Drafted tokens that the target looked at: those whose predecessors were all accepted.

        Exact but for drafts cut short by the end of an answer, for which it counts one too many.
        """
        return self.drafts + sum(n for p, n in self.accepted_at.items() if p < k - 1)

    def acceptance(self, k):
        """Chance that a drafted token is accepted, given that those before it were; or None.

        It says how good the draft is, whatever the draft length.
        """
        judged = self.judged(k)
        return self.accepted / judged if judged > 0 and self.drafted > 0 else None

    def accepted_share(self):
        """Accepted over drafted, which is vLLM's rate and falls with the draft length; or None."""
        return self.accepted / self.drafted if self.drafted > 0 else None

    def mean_length(self):
        """Tokens per verification, the target's own one included; or None."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 else None
