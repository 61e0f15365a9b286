"""The engine's measured costs, and the draft length that they make best."""

MOST = 8


def expected_tokens(a, k):
    """Tokens of one verification of k drafted tokens, each accepted with chance a."""
    return sum(a**i for i in range(k + 1))


def tokens_per_second(curve, a, k):
    """For one stream, on costs as `GET /v1/draft_adapter/engine` gives them."""
    seconds = (curve["verify_ms"][k] + k * curve["draft_ms"][0]) / 1000
    return expected_tokens(a, k) / seconds


def best_length(curve, a):
    """The k of 1 or more that gives the most tokens per second at acceptance a."""
    lengths = range(1, min(MOST, len(curve["verify_ms"]) - 1) + 1)
    return max(lengths, key=lambda k: tokens_per_second(curve, a, k))


def speed_up(curve, a, k):
    """Over plain decoding, by the measured costs."""
    return tokens_per_second(curve, a, k) / tokens_per_second(curve, a, 0)
