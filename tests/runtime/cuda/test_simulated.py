"""The engine's way on a GPU without one: memory by the plan, one graph a token, and nothing left after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from strata.doctor.facts_io import read_facts
from strata.doctor.plan import AllocationPlan, PlanOptions, Tier
from strata.doctor.planner import make_plan
from strata.errors import AllocationFailed, DeviceFailed
from strata.gguf.model_facts import read_model_facts
from strata.gguf.reader import GGUFFile, open_gguf
from strata.kernels.cuda_layout import LAYOUTS
from strata.runtime.engine import Engine
from strata.runtime.memory import MemoryRefused
from strata.runtime.sampler import Sampler, SamplerOptions
from tests.resident import FLOAT, GOLDEN

from .simulated_cupy import UUID, Runtime, simulated_cuda
from .test_embedding import in_planes

H200 = read_facts(GOLDEN.parent / "machines" / "h200-measured.json")
CAPACITY = 2 << 30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with simulated_cuda(monkeypatch, CAPACITY) as runtime:
        yield runtime


@pytest.fixture
def file() -> Iterator[GGUFFile]:
    with open_gguf(GOLDEN / "qwen3moe-IQ3_S.gguf") as file:
        yield file


def planned(file: GGUFFile, **options: Any) -> AllocationPlan:
    plan = make_plan(H200, read_model_facts(file), PlanOptions(device="cuda", max_context=64, **options))
    assert plan.feasible
    return msgspec.structs.replace(plan, device=msgspec.structs.replace(plan.device, id=UUID))


def held(runtime: Runtime) -> tuple[int, int]:
    return sum(map(len, runtime.blocks.values())), sum(runtime.pinned.values())


@pytest.mark.parametrize("name", [*FLOAT, "qwen3moe-IQ3_S", "qwen3moe-Q8_0"])
@pytest.mark.parametrize("slots", [None, 2])
def test_memory_is_taken_by_the_plan_and_given_back(name: str, slots: int | None, cuda: Runtime) -> None:
    with open_gguf(GOLDEN / f"{name}.gguf") as file:
        plan = planned(file, expert_cache=slots)
        with Engine.load(file, plan) as engine:
            lines = {line.id: line.bytes for line in plan.reservations if line.tier is Tier.VRAM}
            not_taken = lines["context"] + lines["modules"] + lines["graphs"]
            pinned = plan.planned_bytes(Tier.PINNED)
            assert held(cuda) == (sum(lines.values()) - not_taken, pinned)
            engine.prefill(list(range(21)))
            engine.decode(3)
            report = engine.memory_report()
            assert report.vram_taken_bytes == held(cuda)[0]
            assert report.planned_bytes == plan.planned_bytes(Tier.PINNED) + plan.planned_bytes(Tier.PAGEABLE)
        assert held(cuda) == (0, 0)


@pytest.mark.parametrize(("slots", "pinned", "graphs"), [(None, None, 1), (2, None, 1), (2, 0, 3)])
def test_graphs_of_a_token(slots: int | None, pinned: int | None, graphs: int, file: GGUFFile, cuda: Runtime) -> None:
    """One where the device can read all experts; else one more than there are layers, of which the model has two."""
    with Engine.load(file, planned(file, expert_cache=slots, pinned_budget_bytes=pinned)) as engine:
        step: Any = engine._model.step
        for token in range(4):
            before = step.launches
            engine.decode(token)
            assert step.launches - before == graphs


def test_a_generation_runs_no_step_too_many(file: GGUFFile, cuda: Runtime) -> None:
    with Engine.load(file, planned(file)) as engine:
        step: Any = engine._model.step
        before, counts = step.launches, engine.expert_counts()
        generation = engine.generate([1, 2, 3], Sampler(SamplerOptions()), max_tokens=20)
        assert len(list(generation)) == 20
        assert step.launches - before == 19
        assert engine.position == 22
        facts = read_model_facts(file)
        per_token = facts.layers * facts.top_k
        assert 19 * per_token < (engine.expert_counts() - counts).hits <= 22 * per_token


@pytest.mark.parametrize("line", ["dense", "kv_cache", "expert_slots"])
def test_a_refusal_of_vram_names_line_code_and_words(line: str, file: GGUFFile, cuda: Runtime) -> None:
    plan = planned(file)
    lines = [msgspec.structs.replace(r, bytes=CAPACITY + 1) if r.id == line else r for r in plan.reservations]
    with pytest.raises(AllocationFailed) as caught:
        Engine.load(file, msgspec.structs.replace(plan, reservations=tuple(lines)))
    assert caught.value.line == line
    for word in ("cudaMalloc: out of memory (2 cudaErrorMemoryAllocation)", "1 CUDA device", "MiB free now", "WSL2"):
        assert word in caught.value.found
    cause = caught.value.__cause__
    assert isinstance(cause, MemoryRefused)
    assert cause.free_bytes is not None
    assert held(cuda) == (0, 0)


def test_a_refusal_to_pin_leaves_nothing(file: GGUFFile, cuda: Runtime) -> None:
    cuda.refuse_pinning = True
    with pytest.raises(AllocationFailed, match="cudaHostRegister: invalid argument"):
        Engine.load(file, planned(file))
    assert held(cuda) == (0, 0)


@pytest.mark.parametrize("when", [0, 1, 40])
def test_ctrl_c_while_loading_leaves_nothing(when: int, file: GGUFFile, cuda: Runtime) -> None:
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.load(file, planned(file), progress=interrupt)
    assert held(cuda) == (0, 0)


def test_an_error_of_the_device_is_told_with_its_code(
    file: GGUFFile, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .simulated_cupy import CUDARuntimeError

    def lost(*_: object) -> None:
        raise CUDARuntimeError(719, "cudaErrorLaunchFailure: unspecified launch failure")

    with Engine.load(file, planned(file)) as engine:
        engine.prefill([1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "memcpyAsync", lost)
            with pytest.raises(DeviceFailed, match=r"cudaErrorLaunchFailure: unspecified launch failure \(code 719\)"):
                engine.decode(3)
        assert engine.position == 2  # where it was
    assert held(cuda) == (0, 0)


@pytest.mark.parametrize("type_", ["Q8_0", "Q6_K", "IQ3_S", "Q4_K", "F32"])
def test_pieces_of_the_file_make_the_whole_matrix(type_: str, cuda: Runtime) -> None:
    """Matrices of any size, some of several pieces, arrive in the device's layout, each in its place."""
    from strata.runtime.cuda.device import CudaDevice
    from strata.runtime.cuda.upload import Matrix, Uploader

    layout = LAYOUTS[type_]
    rng = np.random.default_rng(2)

    class Ops:
        """`to_planes` as the kernel does it."""

        def to_planes(self, source: int, out: Any, type_: str, first: int, count: int) -> None:
            given = np.frombuffer((np.ctypeslib.ctypes.c_ubyte * (count * layout.nbytes)).from_address(source), "u1")
            blocks, start = out.nbytes // layout.nbytes, 0
            for offset, size in layout.planes:
                plane = out[start : start + blocks * size].reshape(blocks, size)
                plane[first : first + count] = given.reshape(count, layout.nbytes)[:, offset : offset + size]
                start += blocks * size

    sizes = [int(size) for size in rng.integers(1, 60, 40)]
    stored = [rng.integers(0, 256, size * layout.nbytes, dtype=np.uint8) for size in sizes]
    places = [np.zeros(len(each), np.uint8) for each in stored]

    def device_view(array: np.ndarray) -> Any:
        from .simulated_cupy import DeviceArray

        return array.view(DeviceArray)

    ring = np.zeros((3, 9 * layout.nbytes + 5), np.uint8)
    piece = device_view(np.zeros(7 * layout.nbytes + 1, np.uint8))
    done: list[int] = []
    uploader = Uploader(CudaDevice.open(UUID), Ops(), ring, piece)  # type: ignore[arg-type]
    uploader.load(
        (Matrix(raw, device_view(place), type_) for raw, place in zip(stored, places, strict=True)), done.append
    )
    assert sum(done) == sum(map(len, stored))
    for raw, place in zip(stored, places, strict=True):
        assert place.tobytes() == in_planes(raw, type_)
