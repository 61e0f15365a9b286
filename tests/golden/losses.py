"""Prints the constants of src/distill/loss/tests.rs. Needs numpy only; float64 throughout."""

import numpy as np

logits = np.array([0.3, -1.2, 0.7, 1.5, -0.4, 0.1, 0.9, -2.0])
ids = [3, 0, 5]
p = np.array([0.5, 0.2, 0.1])
p = np.append(p, 1 - p.sum())
q_all = np.exp(logits) / np.exp(logits).sum()
q = np.append(q_all[ids], 1 - q_all[ids].sum())

print("forward_kl", (p * np.log(p / q)).sum())
print("reverse_kl", (q * np.log(q / p)).sum())
print("total_variation", 0.5 * np.abs(p - q).sum())
print("log_alpha", -np.log(np.minimum(p, q).sum()))
m = (p + q) / 2
print("jensen_shannon", 0.5 * (p * np.log(p / m)).sum() + 0.5 * (q * np.log(q / m)).sum())
