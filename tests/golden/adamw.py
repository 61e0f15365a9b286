"""Prints three AdamW steps in float64, as torch.optim.AdamW takes them, for src/distill/optimizer.rs."""

import math

parameter = [0.5, -1.0, 2.0, 0.1]
gradients = [[0.1, -0.2, 0.3, 0.0], [0.2, 0.1, -0.4, 0.5], [-0.3, 0.2, 0.1, 0.1]]
rate, beta1, beta2, eps, decay = 0.01, 0.9, 0.95, 1e-8, 0.1
first, second = [0.0] * 4, [0.0] * 4

for step, gradient in enumerate(gradients, start=1):
    for i, g in enumerate(gradient):
        parameter[i] *= 1 - rate * decay
        first[i] = beta1 * first[i] + (1 - beta1) * g
        second[i] = beta2 * second[i] + (1 - beta2) * g * g
        root = math.sqrt(second[i] / (1 - beta2**step)) + eps
        parameter[i] -= rate / (1 - beta1**step) * first[i] / root

print([round(value, 9) for value in parameter])
