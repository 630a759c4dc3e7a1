"""A qwen3moe of any shape with random blocks, made on the device, as one decode step through the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.kernels.cuda_layout import LAYOUTS, partial_size, row_bytes
from strata.kernels.ops import KvLayer, Rope, RopeStyle


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; see `strata.kernels.ops` for the letters. `cells` is S."""

    layers: int
    e: int
    h: int
    g: int
    d: int
    n: int
    k: int
    f: int
    v: int
    cells: int
    matrix: str = "Q4_K"
    special: str = "Q6_K"  # down, attn_v and head


QWEN3_30B = Shape(48, 2048, 32, 4, 128, 128, 8, 768, 151936, 4096)
SMALL = Shape(2, 512, 8, 2, 64, 16, 4, 256, 1000, 128)

_SCALES = {  # offset of f16 fields in a block and their size, so that weights are about 0.02
    "Q4_K": ((0, 6e-5), (2, 4e-4)),
    "Q5_K": ((0, 3e-5), (2, 4e-4)),
    "Q6_K": ((208, 2e-5),),
    "Q8_0": ((0, 3e-4),),
}


def random_blocks(type_: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [rows, bytes of a row] of random blocks with sane scales, as a file holds them."""
    layout = LAYOUTS[type_]
    raw = rng.integers(0, 256, (rows, columns // layout.columns, layout.nbytes), dtype=np.uint8)
    for offset, value in _SCALES[type_]:
        raw[..., offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return raw.reshape(rows, -1)


class GpuModel:
    """Random weights on the device and the step that decodes `tokens` tokens from `position` on."""

    def __init__(self, shape: Shape, tokens: int, seed: int = 0, slot_order: Any = None) -> None:
        import cupy

        from strata.kernels.cuda_ops import CudaOps, CudaSlots, CudaWeight

        s = self.shape = shape
        rng = np.random.default_rng(seed)
        f32 = cupy.float32
        self.ops = CudaOps(
            {
                "partial": cupy.full(partial_size(tokens, s.h, s.d), cupy.nan, f32),
                "counters": cupy.zeros(tokens * s.h, cupy.uint32),
                "logits": cupy.full((tokens, s.n), cupy.nan, f32),
                "activation": cupy.full((tokens * s.k, s.f), cupy.nan, f32),
            }
        )
        pools: dict[tuple[str, int], Any] = {}

        def quantised(type_: str, rows: int, columns: int) -> Any:
            """Blocks of a matrix, cut from a pool of random rows at a random place and brought into planes."""
            if (type_, columns) not in pools:
                raw = random_blocks(type_, max(1, (16 << 20) // row_bytes(type_, columns)), columns, rng)
                pools[type_, columns] = cupy.asarray(raw)
            pool = pools[type_, columns]
            raw = cupy.empty((rows, pool.shape[1]), cupy.uint8)
            done = 0
            while done < rows:
                start = int(rng.integers(0, len(pool) // 2))
                count = min(rows - done, len(pool) - start)
                raw[done : done + count] = pool[start : start + count]
                done += count
            data = cupy.empty(raw.nbytes, cupy.uint8)
            self.ops.to_planes(raw.data.ptr, data, type_)
            return data

        def weight(type_: str, rows: int, columns: int) -> Any:
            return CudaWeight(quantised(type_, rows, columns), type_, rows, columns)

        def norm(size: int) -> Any:
            return cupy.asarray(1 + 0.02 * rng.standard_normal(size), f32)

        order = np.arange(s.n) if slot_order is None else slot_order
        self.slot_of = cupy.asarray(order, cupy.int32)
        gate, down = s.f * row_bytes(s.matrix, s.e), s.e * row_bytes(s.special, s.f)
        stride = -(-(2 * gate + down) // 256) * 256
        self.layers = []
        for _ in range(s.layers):
            slots = cupy.empty((s.n, stride), cupy.uint8)
            for expert in range(s.n):
                slot = slots[int(order[expert])]
                slot[:gate], slot[gate : 2 * gate] = (quantised(s.matrix, s.f, s.e) for _ in range(2))
                slot[2 * gate : 2 * gate + down] = quantised(s.special, s.e, s.f)
            router = cupy.asarray(rng.standard_normal((s.n, s.e)) / np.sqrt(s.e), f32)
            self.layers.append(
                {
                    "attn_norm": norm(s.e),
                    "q": weight(s.matrix, s.h * s.d, s.e),
                    "k": weight(s.matrix, s.g * s.d, s.e),
                    "v": weight(s.special, s.g * s.d, s.e),
                    "q_norm": norm(s.d),
                    "k_norm": norm(s.d),
                    "o": weight(s.matrix, s.e, s.h * s.d),
                    "ffn_norm": norm(s.e),
                    "router": CudaWeight(router.view(cupy.uint8), "F32", s.n, s.e),
                    "slots": CudaSlots(slots, stride, 0, gate, 2 * gate, s.matrix, s.matrix, s.special),
                    "kv": KvLayer(*(cupy.zeros((s.cells, s.g, s.d), cupy.float16) for _ in range(2))),
                }
            )
        self.embedding = weight(s.matrix, s.v, s.e)
        self.norm = norm(s.e)
        self.head = weight(s.special, s.v, s.e)
        inverse = (1e6 ** (-np.arange(0, s.d, 2) / s.d)).astype(np.float32)
        self.rope = Rope(RopeStyle.NEOX, s.d, cupy.asarray(inverse))
        self.tokens = cupy.zeros(tokens, cupy.int32)
        self.position = cupy.zeros(1, cupy.int32)
        shapes = {"x": (s.e,), "q": (s.h, s.d), "k": (s.g, s.d), "v": (s.g, s.d), "attended": (s.h, s.d)}
        shapes |= {"hidden": (s.e,), "weights": (s.k,), "vocab": (s.v,)}
        self.b = {name: cupy.full((tokens, *size), cupy.nan, f32) for name, size in shapes.items()}
        self.ids, self.slots = (cupy.zeros((tokens, s.k), cupy.int32) for _ in range(2))

    def attention(self, layer: dict[str, Any]) -> None:
        """Run a layer's attention block."""
        b, ops, x = self.b, self.ops, self.b["x"]
        ops.norm_project(x, layer["attn_norm"], 1e-6, (layer["q"], layer["k"], layer["v"]), (b["q"], b["k"], b["v"]))
        norms = (layer["q_norm"], layer["k_norm"])
        args = (norms, 1e-6, self.rope, self.position, layer["kv"], self.shape.d**-0.5, b["attended"])
        ops.attention(b["q"], b["k"], b["v"], *args)
        ops.project_add(b["attended"].reshape(len(x), -1), layer["o"], x)

    def feed_forward(self, layer: dict[str, Any]) -> None:
        """Run a layer's routed feed-forward block."""
        b, ops, x = self.b, self.ops, self.b["x"]
        route = (x, layer["ffn_norm"], 1e-6, layer["router"], True, b["hidden"], self.ids, b["weights"], self.slots)
        ops.route(*route, self.slot_of)
        ops.experts_add(b["hidden"], layer["slots"], self.slots, b["weights"], x)

    def step(self) -> None:
        """Decode the tokens in `tokens` at `position`; the logits are in ``b["vocab"]``."""
        self.ops.embed(self.embedding, self.tokens, self.b["x"])
        for layer in self.layers:
            self.attention(layer)
            self.feed_forward(layer)
        self.ops.head(self.b["x"], self.norm, 1e-6, self.head, self.b["vocab"])
