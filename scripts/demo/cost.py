"""The engine's measured costs, and the draft length that they make best."""

MOST = 8


def expected_tokens(a, k):
    """Tokens of one verification of k drafted tokens, each accepted with chance a."""
    return sum(a**i for i in range(k + 1))


def verify_ms(curve, rows):
    """Milliseconds of a target forward; beyond what was measured its mean slope goes on."""
    measured = curve["verify_ms"]
    if rows <= len(measured):
        return measured[rows - 1]
    slope = max(0.0, (measured[-1] - measured[0]) / (len(measured) - 1))
    return measured[-1] + slope * (rows - len(measured))


def tokens_per_second(curve, a, k, streams=1):
    """Of each stream, on costs as `GET /v1/draft_adapter/engine` gives them."""
    draft = curve["draft_ms"][min(streams, len(curve["draft_ms"])) - 1]
    seconds = (verify_ms(curve, streams * (k + 1)) + k * draft) / 1000
    return expected_tokens(a, k) / seconds


def best_length(curve, a, streams=1):
    """The k of 1 or more that gives the most tokens per second at acceptance a."""
    return max(range(1, MOST + 1), key=lambda k: tokens_per_second(curve, a, k, streams))


def speed_up(curve, a, k):
    """Over plain decoding, by the measured costs."""
    return tokens_per_second(curve, a, k) / tokens_per_second(curve, a, 0)
