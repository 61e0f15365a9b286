"""Makes verify.json: reference values for sampling and verification, in plain Python.

Run from the repository root: python3 tests/golden/verify.py > tests/golden/verify.json
Needs nothing but the standard library. Every number is computed from the definitions, in double
precision: temperature, then top_k, then top_p, as vLLM orders them; acceptance min(1, p/q) and
residual max(0, p - q) normalised.
"""

import json
import math
import random


def softmax(logits, temperature):
    scaled = [x / temperature for x in logits]
    largest = max(scaled)
    weights = [math.exp(x - largest) for x in scaled]
    total = sum(weights)
    return [w / total for w in weights]


def distribution(logits, temperature, top_k, top_p):
    logits = list(logits)
    if 0 < top_k < len(logits):
        edge = sorted(logits, reverse=True)[top_k - 1]
        logits = [x if x >= edge else -math.inf for x in logits]
    p = softmax(logits, temperature)
    if top_p < 1.0:
        # Ascending; of equals the higher id goes first. The most likely token always stays.
        order = sorted(range(len(p)), key=lambda i: (p[i], -i))
        cumulative = 0.0
        for i in order[:-1]:
            cumulative += p[i]
            if cumulative > 1.0 - top_p:
                break
            p[i] = 0.0
        total = sum(p)
        p = [x / total for x in p]
    return p


def residual(p, q):
    rest = [max(0.0, a - b) for a, b in zip(p, q)]
    total = sum(rest)
    return [x / total for x in rest] if total > 0 else rest


def main():
    rng = random.Random(20)
    cases = []
    for temperature in (0.3, 0.7, 1.0, 1.7):
        for top_k in (0, 3):
            for top_p in (1.0, 0.8):
                logits = [round(rng.uniform(-3, 3), 3) for _ in range(10)]
                draft = [round(x + rng.uniform(-1, 1), 3) for x in logits]
                p = distribution(logits, temperature, top_k, top_p)
                # As vLLM: the draft knows the temperature only.
                q = softmax(draft, temperature)
                best = max(range(len(q)), key=lambda i: (q[i], -i))
                one_hot = [1.0 if i == best else 0.0 for i in range(len(q))]
                cases.append(
                    {
                        "logits": logits,
                        "draft_logits": draft,
                        "temperature": temperature,
                        "top_k": top_k,
                        "top_p": top_p,
                        "p": p,
                        "q": q,
                        "overlap": sum(min(a, b) for a, b in zip(p, q)),
                        "residual": residual(p, q),
                        "accept": [min(1.0, a / b) for a, b in zip(p, q)],
                        "one_hot_token": best,
                        "one_hot_accept": p[best],
                        "one_hot_residual": residual(p, one_hot),
                    }
                )
    print(json.dumps(cases, indent=1))


main()
