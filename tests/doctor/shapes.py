"""Facts of released models, made from their public shapes without their weights, and of machines."""

from __future__ import annotations

from hashlib import sha256
from itertools import groupby

from strata.doctor.facts import DiskFacts, Facts, HostFacts, Probe, ProbeStatus
from strata.gguf.model_facts import ExpertClass, ModelFacts, TensorGroup
from strata.gguf.types import TensorType

MIB, GIB = 1 << 20, 1 << 30


def stored(elements: int, type_: str) -> int:
    t = TensorType[type_]
    assert elements % t.block_elements == 0
    return elements // t.block_elements * t.block_bytes


def group(elements: int, type_: str, tensors: int = 1) -> TensorGroup:
    return TensorGroup(tensors=tensors, elements=elements, bytes=stored(elements, type_))


def model(
    name: str,
    architecture: str,
    *,
    layers: int,
    embedding: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    experts: int = 0,
    top_k: int = 0,
    width: int = 0,
    feed_forward: int = 0,
    context_length: int = 32768,
    expert_types: tuple[tuple[str, str, str], ...] = (("Q4_K", "Q4_K", "Q6_K"),),
    dense_type: str = "Q8_0",
    head_type: str = "Q6_K",
    table_type: str = "Q4_K",
    tied: bool = False,
    dense_elements: int | None = None,
    attention_every: int = 1,
) -> ModelFacts:
    """Make the facts of a model; `expert_types` go round over the layers, as mixed quantisations do."""
    dense = dense_elements or layers * (
        2 * embedding * heads * head_dim + 2 * embedding * kv_heads * head_dim + 3 * embedding * feed_forward
    )
    types = [expert_types[layer % len(expert_types)] for layer in range(layers)] if experts else []
    by_types = sorted(range(len(types)), key=lambda layer: types[layer])
    classes = tuple(
        ExpertClass(
            layers=tuple(members),
            experts_per_layer=experts,
            elements=3 * embedding * width,
            bytes=sum(stored(embedding * width, t) for t in kinds),
            types=kinds,
        )
        for kinds, members in groupby(by_types, key=lambda layer: types[layer])
    )
    table, head = group(embedding * vocab, table_type), group(embedding * vocab, head_type)
    dense_group = group(dense, dense_type, tensors=10 * layers)
    parts = dense_group.bytes + table.bytes + (0 if tied else head.bytes)
    return ModelFacts(
        name=name,
        architecture=architecture,
        path=f"{name}.gguf",
        file_bytes=parts + sum(len(c.layers) * experts * c.bytes for c in classes),
        header_bytes=1 << 20,
        header_sha256=sha256(name.encode()).hexdigest(),
        layers=layers,
        embedding=embedding,
        heads=heads,
        kv_heads=tuple(kv_heads if (layer + 1) % attention_every == 0 else 0 for layer in range(layers)),
        key_length=head_dim,
        value_length=head_dim,
        vocab=vocab,
        context_length=context_length,
        feed_forward=feed_forward,
        experts=experts,
        top_k=top_k,
        expert_width=width,
        tied_head=tied,
        embedding_table=table,
        head=table if tied else head,
        dense=dense_group,
        expert_classes=classes,
        quant_types=tuple(sorted({dense_type, head_type, table_type, *(t for kinds in types for t in kinds)})),
    )


Q3_30B = model(
    "Qwen3-30B-A3B",
    "qwen3moe",
    layers=48,
    embedding=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    experts=128,
    top_k=8,
    width=768,
    context_length=40_960,
)
MIXTRAL = model(
    "Mixtral-8x7B",
    "llama",
    layers=32,
    embedding=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32_000,
    experts=8,
    top_k=2,
    width=14_336,
)
DENSE = model(
    "dense-135M",
    "llama",
    layers=30,
    embedding=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49_152,
    feed_forward=1536,
    table_type="Q8_0",
    tied=True,
    context_length=8192,
)
SMALL_MOE = model(
    "small-moe",
    "qwen3moe",
    layers=6,
    embedding=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=32_000,
    experts=64,
    top_k=4,
    width=256,
)


def machine(ram: int | None, *, disk_bytes_per_s: float = 2e9, **host: object) -> Facts:
    """Return the facts of a machine without a GPU that has `ram` bytes available."""
    unknown = {"cgroup_limit_bytes": "no limit"} if "cgroup_limit_bytes" not in host else {}
    if ram is None:
        unknown["ram_available_bytes"] = "/proc/meminfo is missing"
    skipped: Probe = Probe(status=ProbeStatus.SKIPPED)
    facts = {"os": "linux", "cpu_physical": 8, "cpu_model": "8-core CPU", "ram_available_bytes": ram, **host}
    return Facts(
        host=Probe(status=ProbeStatus.OK, value=HostFacts(**facts, unknown=unknown)),  # type: ignore[arg-type]
        nvml=Probe(status=ProbeStatus.UNSUPPORTED),
        cuda=Probe(status=ProbeStatus.UNSUPPORTED),
        pinned=skipped,
        disk=Probe(status=ProbeStatus.OK, value=DiskFacts(read_bytes_per_s=disk_bytes_per_s)),
    )
