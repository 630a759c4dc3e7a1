"""Fewer slots than experts: whatever brings them there, an expert's bytes lie in its slot when it is computed with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.doctor.plan import Tier
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import open_gguf
from strata.kernels import numpy_residency
from strata.kernels.cuda_layout import LAYOUTS
from strata.runtime.engine import Engine
from strata.runtime.loader import expert_tensors
from strata.runtime.profile import read_profile, write_profile
from tests.resident import GOLDEN

from .simulated_cupy import Runtime, simulated_cuda
from .test_embedding import in_planes
from .test_simulated import CAPACITY, held, planned

MODEL = "qwen3moe-IQ3_S"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with simulated_cuda(monkeypatch, CAPACITY) as runtime:
        yield runtime


class Watched:
    """Routes at random, keeps the tables by their definition, and looks into the slots before they are used."""

    def __init__(self, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from strata.kernels.cuda_ops import CudaOps
        from strata.runtime.cuda.graph import Recorder

        facts = read_model_facts(file)
        self.rng = np.random.default_rng(4)
        self.layers = facts.layers
        self.asked: list[np.ndarray] = []
        self.computed = self.distinct = 0
        self.expected = {
            (layer, expert): b"".join(
                in_planes(file.raw(name).reshape(facts.experts, -1)[expert], file.tensors[name].type.name)
                for name in names
            )
            for layer, names in expert_tensors(facts).items()
            for expert in range(facts.experts)
        }

        def route(ops: Any, x: Any, *rest: Any, scale: float = 1) -> None:
            ids = rest[5]
            for row in ids:
                row[:] = self.rng.choice(facts.experts, facts.top_k, replace=False)
            self.asked.append(ids)
            self.distinct += len(np.unique(ids))

        def make_ready(ops: Any, tables: Any, pool: Any, layer: int, ids: Any, slots: Any) -> None:
            assert ids is self.asked[-1]
            self.layer = layer
            numpy_residency.make_ready(tables, pool, layer, ids, slots, read)

        def read(address: int, nbytes: int) -> np.ndarray:
            return np.frombuffer((np.ctypeslib.ctypes.c_ubyte * nbytes).from_address(address), np.uint8)

        def experts_add(ops: Any, hidden: Any, pool: Any, slots: Any, *rest: Any) -> None:
            for expert, slot in zip(self.asked[-1].ravel().tolist(), slots.ravel().tolist(), strict=True):
                expected = self.expected[self.layer, expert]
                assert pool.data[slot * pool.stride :][: len(expected)].tobytes() == expected
                self.computed += 1

        def to_planes(ops: Any, source: int, out: Any, type_: str, first: int, count: int) -> None:
            layout = LAYOUTS[type_]
            given = read(source, count * layout.nbytes).reshape(count, layout.nbytes)
            blocks, start = out.nbytes // layout.nbytes, 0
            for offset, size in layout.planes:
                plane = out[start : start + blocks * size].reshape(blocks, size)
                plane[first : first + count] = given[:, offset : offset + size]
                start += blocks * size

        monkeypatch.setattr(CudaOps, "to_planes", to_planes)
        for name, method in (("route", route), ("make_ready", make_ready), ("experts_add", experts_add)):
            monkeypatch.setattr(CudaOps, name, method)
        monkeypatch.setattr(CudaOps, "prepare", lambda *_: None)
        monkeypatch.setattr(Recorder, "record", lambda recorder, step: SimpleNamespace(graphs=1, replay=step))


@pytest.mark.parametrize("slots", [2, 5, 7])
@pytest.mark.parametrize(
    ("pinned", "ram", "tiers"),
    [
        (None, None, {Tier.PINNED}),
        (0, None, {Tier.PAGEABLE}),
        (0, 0, {Tier.FILE}),
        ("some", None, {Tier.PINNED, Tier.PAGEABLE}),
    ],
)
def test_what_is_computed_with_lies_in_its_slot(
    slots: int,
    pinned: int | str | None,
    ram: int | None,
    tiers: set[Tier],
    cuda: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_gguf(GOLDEN / f"{MODEL}.gguf") as file:
        facts = read_model_facts(file)
        each, total = facts.expert_classes[0].bytes, facts.layers * facts.experts
        if pinned == "some":
            pinned = total // 2 * each  # the planner prefers them to what else could be page-locked
        options = {} if ram is None else {"ram_budget_bytes": leanest_ram(file, slots)}
        plan = planned(file, expert_cache=slots, pinned_budget_bytes=pinned, **options)
        watched = Watched(file, monkeypatch)
        with Engine.load(file, plan) as engine:
            before = engine.expert_counts()
            engine.prefill(list(range(21)))
            for token in range(20):
                engine.decode(token)
            counts = engine.expert_counts() - before
        assert held(cuda) == (0, 0)
    assert watched.computed > 40 * facts.layers
    assert set(counts.filled_bytes) == tiers
    assert sum(counts.filled_bytes.values()) == counts.misses * each
    assert counts.misses - slots <= counts.evictions <= counts.misses
    assert counts.hits + counts.misses <= watched.computed


def leanest_ram(file: Any, slots: int) -> int:
    """Bytes of RAM with which all experts stay in the file."""
    plan = planned(file, expert_cache=slots, pinned_budget_bytes=0)
    return plan.planned_bytes(Tier.PAGEABLE) - plan.line("experts_pageable").bytes  # type: ignore[union-attr]


def test_a_slice_that_is_refused_stays_in_ordinary_ram(cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked by then is used, the rest goes through the host, and the bits stay the same."""
    import strata.runtime.cuda.device as device

    monkeypatch.setattr(device, "PIN_SLICE", 1 << 18)
    with open_gguf(GOLDEN / f"{MODEL}.gguf") as file:
        plan = planned(file, expert_cache=5)
        line = plan.line("experts_pinned")
        assert line is not None
        first = plan.planned_bytes(Tier.PINNED) - line.bytes
        cuda.most_pinned = first + (1 << 18)
        watched = Watched(file, monkeypatch)
        with Engine.load(file, plan) as engine:
            before = engine.expert_counts()
            engine.prefill(list(range(21)))
            filled = (engine.expert_counts() - before).filled_bytes
            (note,) = engine.notes
            assert "stay in ordinary RAM" in note
        assert held(cuda) == (0, 0)
    assert filled[Tier.PINNED]
    assert filled[Tier.PAGEABLE]
    assert watched.computed


def test_what_was_asked_for_starts_in_vram_the_next_time(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The likeliest lie in slots, whole, before the first call; of the others the likeliest are page-locked."""
    with open_gguf(GOLDEN / f"{MODEL}.gguf") as file:
        facts = read_model_facts(file)
        each = facts.expert_classes[0].bytes
        plan = planned(file, expert_cache=4, pinned_budget_bytes=2 * each + 4096)
        assert (plan.experts.pinned, plan.experts.pageable) == (2, 6)
        watched = Watched(file, monkeypatch)
        profile = tmp_path / "profile.npy"
        with Engine.load(file, plan, profile=profile) as engine:
            engine.prefill(list(range(21)))
            engine.decode(1)
        uses = np.load(profile)
        assert uses.sum() == watched.distinct
        likeliest = np.argsort(-uses.ravel().astype(int), kind="stable")
        with Engine.load(file, plan, profile=profile) as engine:
            experts: Any = engine._model.experts
            assert engine.expert_counts().misses == 0
            fresh = read_profile(profile, uses.shape)
            assert fresh is not None
            assert fresh.max() == 32
            assert experts._first == [likeliest[:4].tolist()]
            tiers = [experts._store.held(key)[1] for key in likeliest]
            assert tiers == [*[Tier.PAGEABLE] * 4, *[Tier.PINNED] * 2, *[Tier.PAGEABLE] * 2]
            engine.prefill(list(range(9)))
        assert (np.load(profile) >= fresh).all()


@pytest.mark.parametrize("spoilt", [b"", b"\x93NUMPY", None])
def test_a_profile_that_cannot_be_read_counts_for_nothing(spoilt: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "profile.npy"
    if spoilt is None:
        write_profile(path, np.ones((2, 3), np.uint32))
    else:
        path.write_bytes(spoilt)
    assert read_profile(path, (2, 4)) is None
    write_profile(path, np.array([[0, 64, 1], [2, 4, 8]], np.uint32))
    found = read_profile(path, (2, 3))
    assert found is not None
    assert found.tolist() == [[0, 32, 0], [1, 2, 4]]
    assert [each.name for each in tmp_path.iterdir()] == ["profile.npy"]
