"""The arithmetic of the models once more: float64, one token and one head at a time, as the papers write it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strata.gguf.model_facts import ModelFacts


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def rotate(head: np.ndarray, position: int, frequencies: np.ndarray, style: str) -> np.ndarray:
    """Rotate the leading pairs of one head."""
    out = np.array(head, np.float64)
    pairs = len(frequencies)
    for i, frequency in enumerate(np.asarray(frequencies, np.float64)):
        a, b = (2 * i, 2 * i + 1) if style == "norm" else (i, i + pairs)
        c, s = np.cos(position * frequency), np.sin(position * frequency)
        out[a], out[b] = head[a] * c - head[b] * s, head[a] * s + head[b] * c
    return out


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, scale: float) -> np.ndarray:
    """Attention of q [T, H, D] over keys and values [S, G, D], token by token and head by head."""
    out = np.zeros((*q.shape[:2], values.shape[2]))
    share = q.shape[1] // keys.shape[1]
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = slice(0, position + t + 1)
            scores = keys[seen, h // share].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            out[t, h] = softmax(scores) @ values[seen, h // share].astype(np.float64)
    return out


def gated(h: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up, down = (np.asarray(w, np.float64) for w in (gate, up, down))
    return down @ (silu(gate @ h) * (up @ h))


def route(h: np.ndarray, router: np.ndarray, top_k: int, normalise: bool) -> tuple[np.ndarray, np.ndarray]:
    p = softmax(np.asarray(router, np.float64) @ h)
    ids = sorted(range(len(p)), key=lambda e: (-p[e], e))[:top_k]
    weights = p[ids]
    return np.array(ids), weights / weights.sum() if normalise else weights


def forward(
    facts: ModelFacts, w: Mapping[str, np.ndarray], tokens: np.ndarray, *, style: str, base: float, eps: float
) -> np.ndarray:
    """Logits [T, V] of a Llama or Qwen3 MoE from its tensors by name."""
    d, heads, groups = facts.key_length, facts.heads, facts.kv_heads[0]
    frequencies = base ** (-np.arange(0, d, 2) / d)
    if "rope_freqs.weight" in w:
        frequencies = frequencies / w["rope_freqs.weight"]
    x = [w["token_embd.weight"][t].astype(np.float64) for t in tokens]
    for layer in range(facts.layers):
        b = {name.split(".", 2)[2].removesuffix(".weight"): w[name] for name in w if name.startswith(f"blk.{layer}.")}
        q, k, v = [], [], []
        for t, row in enumerate(x):
            h = rms(row, b["attn_norm"], eps)
            qs, ks = (b["attn_q"] @ h).reshape(heads, d), (b["attn_k"] @ h).reshape(groups, d)
            if "attn_q_norm" in b:
                qs = np.stack([rms(head, b["attn_q_norm"], eps) for head in qs])
                ks = np.stack([rms(head, b["attn_k_norm"], eps) for head in ks])
            q.append([rotate(head, t, frequencies, style) for head in qs])
            k.append([rotate(head, t, frequencies, style) for head in ks])
            v.append((b["attn_v"] @ h).reshape(groups, -1))
        attended = attend(np.array(q), np.array(k), np.array(v), 0, d**-0.5)
        for t in range(len(x)):
            x[t] = x[t] + b["attn_output"] @ attended[t].reshape(-1)
            h = rms(x[t], b["ffn_norm"], eps)
            if "ffn_gate_inp" not in b:
                x[t] = x[t] + gated(h, b["ffn_gate"], b["ffn_up"], b["ffn_down"])
                continue
            for e, factor in zip(*route(h, b["ffn_gate_inp"], facts.top_k, True), strict=True):
                x[t] = x[t] + factor * gated(h, *(b[f"ffn_{part}_exps"][e] for part in ("gate", "up", "down")))
    head = w.get("output.weight", w["token_embd.weight"])
    return np.array([head @ rms(row, w["output_norm.weight"], eps) for row in x])
