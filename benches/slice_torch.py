#!/usr/bin/env python3
"""Calibrates, slices and heals a Llama-type model in PyTorch: the peer of benches/build.py.

    benches/slice_torch.py MODEL IDS.json HIDDEN MLP LAYERS OUT

The algorithm of src/build (statistics on every third window, one write map, read decoders and writers
by ridge regression, block by block) in float32 on all cores, sums and solves in float64. IDS holds
lists of token ids, LAYERS numbers with commas between. Writes OUT/model.safetensors.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

WINDOW, BATCH, RIDGE = 512, 8, 0.1


class Window:
    def __init__(self, texts):
        time = max(map(len, texts))
        self.ids = torch.zeros(len(texts), time, dtype=torch.long)
        for row, text in enumerate(texts):
            self.ids[row, : len(text)] = torch.tensor(text)
        lengths = torch.tensor([len(text) for text in texts])
        self.rows = (torch.arange(time)[None] < lengths[:, None]).flatten().nonzero()[:, 0]

    def pick(self, x):
        return x.flatten(0, 1)[self.rows]


def windows(texts):
    texts = sorted((text[:WINDOW] for text in texts), key=len)
    return [Window(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)]


def unit(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def ridge(xx, xy, prior):
    strength = RIDGE * xx.diagonal().mean()
    left = xx + strength * torch.eye(len(xx), dtype=torch.float64)
    return torch.cholesky_solve(xy + strength * prior, torch.linalg.cholesky(left)).float()


class Block:
    """Readers with their gains folded in, and writers, of a block or of what is kept of one."""

    def __init__(self, q, k, v, o, gate, up, down, head_dim):
        self.q, self.k, self.v, self.o = q, k, v, o
        self.gate, self.up, self.down, self.head_dim = gate, up, down, head_dim

    @classmethod
    def of(cls, layer, head_dim):
        a, m = layer.self_attn, layer.mlp
        first, second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return cls(
            a.q_proj.weight * first, a.k_proj.weight * first, a.v_proj.weight * first, a.o_proj.weight,
            m.gate_proj.weight * second, m.up_proj.weight * second, m.down_proj.weight, head_dim,
        )

    def attend(self, x, eps, cos, sin):
        b, t, _ = x.shape
        normed = unit(x, eps)
        split = lambda w: F.linear(normed, w).view(b, t, -1, self.head_dim).transpose(1, 2)
        q, k, v = split(self.q), split(self.k), split(self.v)
        half = self.head_dim // 2
        turn = lambda y: y * cos[:t] + torch.cat((-y[..., half:], y[..., :half]), -1) * sin[:t]
        out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(b, t, -1)

    def gated(self, x, eps):
        normed = unit(x, eps)
        return F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up)


@torch.no_grad()
def main():
    folder, ids, hidden, mlp, layers, out = sys.argv[1:]
    hidden, mlp, layers = int(hidden), int(mlp), [int(n) for n in layers.split(",")]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, embed = model.config, model.model.embed_tokens.weight
    head_dim, groups = config.head_dim, config.num_key_value_heads
    d, eps = config.hidden_size, config.rms_norm_eps
    theta = config.rope_parameters["rope_theta"]
    angle = torch.outer(torch.arange(WINDOW), theta ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    text = windows(json.loads(Path(ids).read_text()))

    # Statistics: one walk, block by block.
    some = text[::3]
    xs = [embed[w.ids] for w in some]
    total = torch.zeros(d, d, dtype=torch.float64)
    influence, channels, heads = [], [], []

    def site(gram):
        for w, x in zip(some, xs):
            rows = unit(w.pick(x), eps)
            gram += (rows.T @ rows).double()

    for layer in model.model.layers:
        block = Block.of(layer, head_dim)
        gram = torch.zeros(d, d, dtype=torch.float64)
        site(gram)
        energy, head_energy, moved = torch.zeros(block.down.shape[1], dtype=torch.float64), 0.0, 0.0
        before = list(xs)
        for at, w in enumerate(some):
            attended = block.attend(xs[at], eps, cos, sin)
            rows = w.pick(attended).view(len(w.rows), groups, -1)
            written = torch.einsum("ngi,dgi->ngd", rows, block.o.view(d, groups, -1))
            head_energy = head_energy + written.pow(2).sum((0, 2)).double()
            xs[at] = xs[at] + F.linear(attended, block.o)
        site(gram)
        total += gram / gram.trace()
        for at, w in enumerate(some):
            gated = block.gated(xs[at], eps)
            energy += w.pick(gated).pow(2).sum(0).double()
            xs[at] = xs[at] + F.linear(gated, block.down)
            cosine = F.cosine_similarity(w.pick(before[at]), w.pick(xs[at]))
            moved += float((1 - cosine).sum())
        influence.append(moved)
        heads.append(head_energy)
        channels.append(energy * block.down.pow(2).sum(0).double())
    gram = torch.zeros(d, d, dtype=torch.float64)
    site(gram)
    total += gram / gram.trace()
    q64 = torch.linalg.eigh(total).eigenvectors.flip(1)[:, :hidden]
    q = q64.float()
    prior = (d / hidden) ** 0.5 * q64.T
    small_eps = eps * d / hidden

    # Healing: the draft follows the target along a second walk.
    xs = [embed[w.ids] for w in text]
    zs = [x @ q for x in xs]

    def decoder():
        xx, xy = torch.zeros(hidden, hidden, dtype=torch.float64), torch.zeros(hidden, d, dtype=torch.float64)
        for w, x, z in zip(text, xs, zs):
            a, b = unit(w.pick(z), small_eps), unit(w.pick(x), eps)
            xx += (a.T @ a).double()
            xy += (a.T @ b).double()
        return ridge(xx, xy, prior).T

    def writer(source, inputs):
        n = source.shape[1]
        xx, xy = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, hidden, dtype=torch.float64)
        for w, x, z, given in zip(text, xs, zs, inputs):
            goal = w.pick(x)
            weight = torch.rsqrt(goal.pow(2).mean(-1, keepdim=True) + 1e-12)
            a, b = w.pick(given) * weight, (goal @ q - w.pick(z)) * weight
            xx += (a.T @ a).double()
            xy += (a.T @ b).double()
        return ridge(xx, xy, source.T.double() @ q64).T

    tensors, open_block, inputs = {}, None, None
    for index, layer in enumerate(model.model.layers):
        block = Block.of(layer, head_dim)
        if index in layers:
            if open_block is not None:
                open_block.down = writer(open_block.down, inputs)
                zs = [z + F.linear(given, open_block.down) for z, given in zip(zs, inputs)]
            kept = channels[index].argsort(descending=True)[:mlp].sort().values
            b = decoder()
            small = Block(
                block.q @ b, block.k @ b, block.v @ b, block.o, block.gate[kept], block.up[kept],
                block.down[:, kept], head_dim,
            )
            open_block = small
            inputs = [small.attend(z, small_eps, cos, sin) for z in zs]
        for at in range(len(text)):
            xs[at] = xs[at] + F.linear(block.attend(xs[at], eps, cos, sin), block.o)
        if index in layers:
            small.o = writer(block.o, inputs)
            zs = [z + F.linear(given, small.o) for z, given in zip(zs, inputs)]
            b = decoder()
            small.gate, small.up = small.gate @ b, small.up @ b
            inputs = [small.gated(z, small_eps) for z in zs]
            place = f"model.layers.{layers.index(index)}"
            tensors[place] = small
        for at in range(len(text)):
            xs[at] = xs[at] + F.linear(block.gated(xs[at], eps), block.down)
    open_block.down = writer(open_block.down, inputs)
    zs = [z + F.linear(given, open_block.down) for z, given in zip(zs, inputs)]
    b = decoder()
    named = {
        "model.embed_tokens.weight": embed @ q,
        "lm_head.weight": (model.lm_head.weight * model.model.norm.weight) @ b,
        "model.norm.weight": torch.ones(hidden),
    }
    for place, small in tensors.items():
        for name, weight in {
            "self_attn.q_proj": small.q, "self_attn.k_proj": small.k, "self_attn.v_proj": small.v,
            "self_attn.o_proj": small.o, "mlp.gate_proj": small.gate, "mlp.up_proj": small.up,
            "mlp.down_proj": small.down,
        }.items():
            named[f"{place}.{name}.weight"] = weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            named[f"{place}.{norm}.weight"] = torch.ones(hidden)
    Path(out).mkdir(parents=True)
    save_file({name: weight.contiguous() for name, weight in named.items()}, Path(out) / "model.safetensors")


if __name__ == "__main__":
    main()
