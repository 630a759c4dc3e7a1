from __future__ import annotations

import pytest

from strata.doctor.facts import PinnedFacts, ProbeStatus
from strata.doctor.probes import pinned
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.nvml_gauge import NvmlGauge
from strata.doctor.probes.pinned import chunk_size, is_known_bad, try_pinning
from strata.doctor.probes.request import ProbeRequest, ProbeStopped
from tests.doctor.probes.fake_cupy import MIB, NO_DEVICE, FakeRuntime


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "LARGE_CHUNK", 8 * MIB)
    monkeypatch.setattr(pinned, "SMALL_CHUNK", 2 * MIB)
    monkeypatch.setattr(pinned, "SCRATCH_BYTES", 3 * MIB)  # divides no chunk


def states(
    runtime: FakeRuntime, asked: int = 32 * MIB, ballast: int = 0, gauge: NvmlGauge | None = None
) -> list[PinnedFacts]:
    request = ProbeRequest(pin_bytes=asked, ballast_bytes=ballast)
    return list(try_pinning(runtime, request, lambda: "GPU-1", gauge or NvmlGauge(None, "no NVML")))


def test_everything_granted() -> None:
    runtime = FakeRuntime()
    facts = states(runtime)[-1]
    assert (facts.asked_bytes, facts.granted_bytes) == (32 * MIB, 32 * MIB)
    assert (facts.chunk_bytes, facts.largest_chunk_bytes) == (8 * MIB, 8 * MIB)
    assert (facts.verified, facts.refusal, facts.malloc_after_refusal_ok) == (True, None, None)
    assert (facts.register_granted_bytes, facts.register_refusal) == (8 * MIB, None)
    assert facts.device_uuid == "GPU-1"
    assert runtime.calls.count("hostAlloc") == runtime.calls.count("freeHost") == 4


def test_last_chunk_is_what_is_left_and_no_more_is_ever_pinned() -> None:
    runtime = FakeRuntime()
    assert states(runtime, asked=35 * MIB)[-1].granted_bytes == 35 * MIB
    assert runtime.highest_pinned == 35 * MIB


@pytest.mark.parametrize("code", [2, 1, 208, 100])
def test_budget_that_ends_while_the_device_works(code: int) -> None:
    """WSL's driver refuses with varying codes; the malloc that still works tells a budget from a broken context."""
    facts = states(FakeRuntime(pinned_bytes=20 * MIB, refusal=code))[-1]
    assert (facts.granted_bytes, facts.largest_chunk_bytes) == (16 * MIB, 8 * MIB)
    assert facts.refusal is not None
    assert (facts.refusal.code, facts.refusal.call) == (code, "cudaHostAlloc(8 MiB)")
    assert (facts.malloc_after_refusal_ok, facts.malloc_refusal) == (True, None)
    assert facts.register_granted_bytes == 8 * MIB  # the budget was given back first


def test_broken_context_refuses_both() -> None:
    refuse = {"hostAlloc": NO_DEVICE, "malloc": NO_DEVICE, "hostRegister": NO_DEVICE}
    facts = states(FakeRuntime(refuse=refuse))[-1]
    assert facts.granted_bytes == 0
    assert facts.refusal is not None
    assert facts.malloc_refusal is not None
    assert (facts.refusal.name, facts.malloc_refusal.name) == ("cudaErrorNoDevice", "cudaErrorNoDevice")
    assert facts.malloc_after_refusal_ok is False
    assert facts.verified is None


def test_device_that_cannot_be_set_counts_as_both_refused() -> None:
    (facts,) = states(FakeRuntime(refuse={"setDevice": 46}))
    assert facts.refusal is not None
    assert facts.refusal.call == "cudaSetDevice(0)"
    assert facts.malloc_after_refusal_ok is False


def test_chunk_that_cannot_be_copied_is_not_granted() -> None:
    facts = states(FakeRuntime(refuse={"memcpy": 700}))[-1]
    assert facts.granted_bytes == 0
    assert facts.refusal is not None
    assert facts.refusal.call == "copying 8 MiB to the device and back"


def test_bytes_that_come_back_changed() -> None:
    facts = states(FakeRuntime(corrupt=True))[-1]
    assert facts.verified is False
    assert facts.granted_bytes == 32 * MIB


def test_register_refused_where_alloc_works() -> None:
    facts = states(FakeRuntime(refuse={"hostRegister": 801}))[-1]
    assert facts.granted_bytes == 32 * MIB
    assert facts.register_granted_bytes == 0
    assert facts.register_refusal is not None
    assert facts.register_refusal.name == "cudaErrorNotSupported"


def test_ballast_takes_its_part_of_a_shared_budget() -> None:
    without = states(FakeRuntime(vram_bytes=600 * MIB, pinned_bytes=300 * MIB, shared=True))[-1]
    runtime = FakeRuntime(vram_bytes=600 * MIB, pinned_bytes=300 * MIB, shared=True)
    loaded = states(runtime, ballast=280 * MIB)[-1]
    assert (without.granted_bytes, without.ballast_bytes) == (32 * MIB, 0)
    assert (loaded.granted_bytes, loaded.ballast_bytes) == (16 * MIB, 280 * MIB)
    assert loaded.refusal is not None


@pytest.mark.parametrize(
    ("vram", "refuse", "message"),
    [(600, {}, "would not leave 256 MiB"), (2048, {"malloc": 2}, "out of memory")],
)
def test_ballast_that_does_not_fit_stops_the_probe_before_it_pins(
    vram: int, refuse: dict[str, int], message: str
) -> None:
    runtime = FakeRuntime(vram_bytes=vram * MIB, refuse=refuse)
    with pytest.raises(ProbeStopped, match=message) as stopped:
        states(runtime, ballast=400 * MIB)
    assert stopped.value.status is ProbeStatus.FAILED
    assert "hostAlloc" not in runtime.calls


class Resident:
    """Acts like `NvmlGauge` for a driver that keeps `share` of what is granted in VRAM, beside 100 MiB of others."""

    def __init__(self, runtime: FakeRuntime, share: float) -> None:
        self.runtime, self.share = runtime, share

    def index(self, uuid: str | None, pci_bus_id: str) -> int:
        assert (uuid, pci_bus_id) == ("GPU-1", "0000:01:00.0")
        return 5

    def used_bytes(self, index: int | None) -> int:
        assert index == 5
        free, total = self.runtime.memGetInfo()
        return 100 * MIB + int((total - free) * self.share)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.0])
def test_what_of_the_ballast_is_in_vram_is_asked_after_it_was_written(share: float) -> None:
    runtime = FakeRuntime(vram_bytes=2048 * MIB)
    facts = states(runtime, ballast=280 * MIB, gauge=Resident(runtime, share))[-1]  # type: ignore[arg-type]
    assert facts.ballast_resident_bytes == int(280 * MIB * share)
    assert facts.sources["ballast_resident_bytes"] == "NVML"
    written = runtime.calls.index("memset")
    assert "memGetInfo" in runtime.calls[:written]
    assert "memGetInfo" in runtime.calls[written:]


def test_without_nvml_what_is_in_vram_is_unknown_with_its_reason() -> None:
    facts = states(FakeRuntime(vram_bytes=2048 * MIB), ballast=280 * MIB)[-1]
    assert (facts.ballast_bytes, facts.ballast_resident_bytes) == (280 * MIB, None)
    assert facts.unknown["ballast_resident_bytes"] == "no NVML"
    assert states(FakeRuntime())[-1].unknown == {}  # nothing was held, so nothing is unknown


def test_progress_is_reported_after_each_chunk() -> None:
    granted = [facts.granted_bytes for facts in states(FakeRuntime(pinned_bytes=20 * MIB))]
    assert granted == [0, 8 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB]


def test_unknown_uuid_has_its_reason() -> None:
    def no_uuid() -> str:
        raise Unknown("not told")

    facts = list(try_pinning(FakeRuntime(), ProbeRequest(pin_bytes=MIB), no_uuid, NvmlGauge(None)))[-1]
    assert facts.device_uuid is None
    assert facts.unknown == {"device_uuid": "not told"}
    assert facts.granted_bytes == MIB


def test_nothing_to_ask_for_is_a_skip() -> None:
    with pytest.raises(ProbeStopped) as stopped:
        states(FakeRuntime(), asked=0)
    assert stopped.value.status is ProbeStatus.SKIPPED


def test_chunks() -> None:
    assert chunk_size(MIB) == MIB
    assert chunk_size(31 * MIB) == 2 * MIB
    assert chunk_size(32 * MIB) == 8 * MIB


@pytest.mark.parametrize(
    ("kernel", "bad"),
    [
        ("6.11.0-9-generic", True),
        ("6.11.4", True),
        ("6.11", True),
        ("6.1.11", False),
        ("6.110.0", False),
        ("6.12.1", False),
    ],
)
def test_known_bad_kernel(kernel: str, bad: bool) -> None:
    assert is_known_bad(kernel) is bad


def test_known_bad_kernel_is_skipped_before_cupy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "release", lambda: "6.11.0-21-generic")
    monkeypatch.setattr(pinned, "import_cupy", lambda packages: pytest.fail("CuPy was imported"))
    with pytest.raises(ProbeStopped, match=r"Linux 6\.11\.0-21-generic") as stopped:
        list(pinned.probe(ProbeRequest(pin_bytes=MIB)))
    assert stopped.value.status is ProbeStatus.SKIPPED
