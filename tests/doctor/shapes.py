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
    recurrent_bytes: int = 0,
    index_values: int = 0,
    window: int = 0,
    row_tables: TensorGroup | None = None,
    draft: TensorGroup | None = None,
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
        recurrent_state_bytes=recurrent_bytes,
        index_values=index_values,
        window=window,
        windowed_layers=tuple(range(0, layers, 2)) if window else (),
        row_tables=row_tables or TensorGroup(),
        draft=draft or TensorGroup(),
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
Q3_235B = model(
    "Qwen3-235B-A22B",
    "qwen3moe",
    layers=94,
    embedding=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    experts=128,
    top_k=8,
    width=1536,
    context_length=40_960,
)
GDN_32 = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 4  # a layer with 32 value heads: state and window
Q3_NEXT = model(
    "Qwen3-Next-80B-A3B",
    "qwen3next",
    layers=48,
    embedding=2048,
    heads=16,
    kv_heads=2,
    head_dim=256,
    vocab=151_936,
    experts=512,
    top_k=10,
    width=512,
    context_length=262_144,
    attention_every=4,
    recurrent_bytes=36 * GDN_32,
    dense_elements=48 * 2048 * (12_288 + 4096 + 3 * 512 + 512),
)
Q36_35B = model(
    "Qwen3.6-35B-A3B",
    "qwen35moe",
    layers=40,
    embedding=2048,
    heads=16,
    kv_heads=2,
    head_dim=256,
    vocab=248_320,
    experts=256,
    top_k=8,
    width=512,
    context_length=262_144,
    attention_every=4,
    recurrent_bytes=30 * GDN_32,
    dense_elements=40 * 2048 * (12_288 + 4096 + 3 * 512 + 256),
)
# As reported: dense part about 2.9 GiB, embedding 322 MiB, head 437,043,200 bytes, experts 46.84 GiB, draft 836 MiB.
FLASH_NEXT = model(
    "Qwen3.8-Flash-Next",
    "qwen4exp",
    layers=48,
    embedding=2560,
    heads=24,
    kv_heads=2,
    head_dim=256,
    vocab=248_320,
    experts=512,
    top_k=10,
    width=640,
    context_length=262_144,
    expert_types=(("IQ3_S",) * 3, ("IQ3_XXS", "IQ3_XXS", "IQ3_S")) * 5 + (("IQ3_S",) * 3,) * 2,
    table_type="IQ4_XS",
    head_type="Q5_K",
    attention_every=4,
    recurrent_bytes=36 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 4),
    index_values=12 * 128,
    dense_elements=2_930_000_000,
    row_tables=group(320_001_536 * 160, "IQ4_NL"),  # rows of 160 fill no block of 256
    draft=TensorGroup(tensors=20, elements=830_000_000, bytes=836 << 20),
)
GPT_OSS_20B, GPT_OSS_120B = (
    model(
        name,
        "gpt-oss",
        layers=layers,
        embedding=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201_088,
        experts=experts,
        top_k=4,
        width=2880,
        context_length=131_072,
        expert_types=(("MXFP4",) * 3,),
        window=128,
        head_type="Q8_0",
        table_type="Q8_0",
    )
    for name, layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128))
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
