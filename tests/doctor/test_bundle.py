"""The files of a report: complete, capped, redacted, and written whole or not at all."""

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.doctor.bundle import SECTION, write_bundle
from strata.doctor.diagnose import diagnose
from strata.doctor.facts import Facts
from strata.doctor.findings import Status
from strata.doctor.raw_outputs import raw_outputs
from strata.doctor.redact import Identity, Redactor
from strata.errors import UsageError
from tests.doctor.machines import cases

ME = Identity(("me-myself",), ("/home/me-myself",), ("my-box",))


def test_bundle_holds_everything_redacted(tmp_path: Path) -> None:
    machine = cases()["wsl2-embedding-pageable"].machine(
        {"disk.value.path": "/home/me-myself/m.gguf", "cuda.value.environment": {"HF_TOKEN": "hf_AbCdEfGhIjKl"}}
    )
    report = diagnose(machine.facts, model=machine.model, plan=machine.plan)
    log = tmp_path / "run-1.jsonl"
    event = {"event": "start", "path": "/home/me-myself/m.gguf", "host": "my-box"}
    log.write_text(json.dumps(event) + '\n{"event": "cut off at /home/me-my', encoding="utf-8")
    raw = {"nvidia-smi -q": "Serial Number : 1234567890\n" * 5000}
    made = write_bundle(report, tmp_path / "out", logs=[log], raw=raw, redactor=Redactor(ME))
    with zipfile.ZipFile(made.archive) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(files) == {
        *("report.md", "facts.json", "findings.json", "plan.json", "versions.json"),
        *("raw/nvidia-smi--q.txt", "logs/run-1.jsonl"),
    }
    files["pasted"] = made.markdown.read_text(encoding="utf-8")
    for name, text in files.items():
        for secret in ("me-myself", "my-box", "hf_AbC", "1234567890", report.plan.device.id if report.plan else ""):
            assert secret not in text, name
    assert len(files["raw/nvidia-smi--q.txt"].encode()) <= SECTION
    assert {r.kind for r in made.replaced} >= {"home", "host", "token", "serial", "uuid"}
    again = msgspec.json.decode(files["facts.json"], type=Facts)  # it replays, to the same findings
    assert [f.status for f in diagnose(again).findings] == [f.status for f in diagnose(machine.facts).findings]


def test_only_the_last_ten_logs_are_taken(tmp_path: Path) -> None:
    logs = [tmp_path / f"run-{n}.jsonl" for n in range(12)]
    for log in logs[1:]:
        log.write_text("{}\n")
    made = write_bundle(diagnose(cases()["h200-server"].machine().facts), tmp_path, logs=logs, redactor=Redactor(ME))
    with zipfile.ZipFile(made.archive) as archive:
        taken = [name for name in archive.namelist() if name.startswith("logs/")]
        assert taken == [f"logs/run-{n}.jsonl" for n in range(10)]
        assert "could not be read" in archive.read("logs/run-0.jsonl").decode()


def test_a_server_with_sixteen_gpus_and_long_logs_still_fits_an_issue(tmp_path: Path) -> None:
    case = cases()["h200-server"]
    gpu, device = case.document["nvml"]["value"]["gpus"][0], case.document["cuda"]["value"]["devices"][0]
    held = [{"pid": 1000 + n, "name": f"/opt/python{n}/bin/python", "used_bytes": 1 << 30} for n in range(20)]
    uuids = [f"GPU-{n:08x}-1234-5678-9abc-def012345678" for n in range(16)]
    facts = case.machine(
        {
            "nvml.value.gpus": [
                gpu | {"index": n, "uuid": uuid, "processes": held, "vram_used_bytes": 140 << 30, "vram_free_bytes": 0}
                for n, uuid in enumerate(uuids)
            ],
            "cuda.value.devices": [
                device | {"ordinal": n, "uuid": uuid, "nvml_index": n} for n, uuid in enumerate(uuids)
            ],
            "host.value.kernel_log": [f"NVRM: Xid (PCI:0000:{n:02x}:00): 31, pid={n}, " + "x" * 400 for n in range(40)],
        }
    ).facts
    logs = [tmp_path / f"run-{n}.jsonl" for n in range(10)]
    for log in logs:
        log.write_text(
            "".join(json.dumps({"event": "step", "n": n, "at": "/home/me-myself"}) + "\n" for n in range(9999))
        )
    plan = cases()["wsl2-embedding-pageable"].machine().plan
    report = diagnose(facts, plan=plan)
    raw = {"nvidia-smi -q": "Serial Number : 1234567890\n" * 20_000, "pip list": "x==1\n" * 20_000}
    made = write_bundle(report, tmp_path, logs=logs, raw=raw, redactor=Redactor(ME))
    text = made.markdown.read_text(encoding="utf-8")
    assert len(text.encode()) < 50_000
    assert [f.id for f in report.findings if f.status in (Status.FAIL, Status.WARN) and f.id not in text] == []
    with zipfile.ZipFile(made.archive) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
        again = msgspec.json.decode(archive.read("facts.json"), type=Facts)
        for name in sizes:
            assert b"me-myself" not in archive.read(name)
            assert b"1234567890" not in archive.read(name)
    assert set(sizes) == {
        *("report.md", "facts.json", "findings.json", "plan.json", "versions.json"),
        *("raw/nvidia-smi--q.txt", "raw/pip-list.txt"),
        *(f"logs/{log.name}" for log in logs),
    }
    assert all(nbytes <= SECTION for name, nbytes in sizes.items() if name.startswith(("raw/", "logs/")))
    assert again.nvml.value
    assert len({gpu.uuid for gpu in again.nvml.value.gpus}) == 16  # pseudonyms, and apart


def test_a_token_that_is_wrapped_over_two_lines_of_a_log_is_whole_again(tmp_path: Path) -> None:
    log = tmp_path / "run-1.jsonl"
    log.write_text('{"event": "start"}\nHF_TOKEN: hf_AbCdEfGhIj\n  KlMnOpQr7\ntext\n{"event": "end"}\nlast', "utf-8")
    made = write_bundle(
        diagnose(cases()["h200-server"].machine().facts), tmp_path, logs=[log], redactor=Redactor(ME), raw={}
    )
    with zipfile.ZipFile(made.archive) as archive:
        lines = archive.read("logs/run-1.jsonl").decode().splitlines()
    assert lines == ['{"event":"start"}', "HF_TOKEN: [token]", "text", '{"event":"end"}', "last"]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(UsageError, match="Choose another folder"):
        write_bundle(diagnose(cases()["h200-server"].machine().facts), taken, redactor=Redactor(ME))
    assert list(tmp_path.iterdir()) == [taken]


def test_raw_outputs_wait_for_nobody() -> None:
    started = time.monotonic()
    outputs = raw_outputs(
        {
            "speaks": (sys.executable, "-c", "print('hello')"),
            "complains": (sys.executable, "-c", "import sys; sys.exit('no')"),
            "hangs": (sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(60)"),
            "is absent": ("no-such-tool-here",),
        },
        time_limit_s=3,
    )
    assert time.monotonic() - started < 10
    assert outputs["speaks"] == "hello"
    assert outputs["complains"] == "no"
    assert outputs["hangs"] == "so far\n\n[no end within 3 s]"
    assert outputs["is absent"].startswith("could not be run: ")


SECRETS = (
    "me-myself",
    "my-box",
    "AbCdEfGhIjKl",
    "203.0.113.7",
    "aa:bb:cc",
    "12345678-1234",
    "X9Y8Z7W6",
    "bob@",
    "hunter2",
)
CANARY = (
    "/home/me-myself/m.gguf me-myself@my-box hf_AbCdEfGhIjKl 203.0.113.7 aa:bb:cc:dd:ee:ff "
    "GPU-12345678-1234-5678-9abc-def012345678 Serial Number: X9Y8Z7W6 bob@example.org https://bob:hunter2@h.example"
)


def smuggled(value: Any) -> Any:
    """Return a document with the canary behind every string that is free text, and behind open mappings' keys."""
    if isinstance(value, msgspec.Struct):
        fields = {name: smuggled(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {f"{k} {CANARY}" if type(k) is str else k: smuggled(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(smuggled, value))
    return f"{value} {CANARY}" if type(value) is str else value


@pytest.mark.parametrize(
    "name", ["wsl2-embedding-pageable", "seed-000-broken-context", "game-took-vram", "illegal-access"]
)
def test_no_field_whatever_it_holds_carries_a_name_out(tmp_path: Path, name: str) -> None:
    machine = cases()[name].machine()
    plan = smuggled(machine.plan) if machine.plan else None
    report = diagnose(smuggled(machine.facts), model=machine.model, plan=plan)
    log = tmp_path / "run-1.jsonl"
    nested = {"event": "error", "message": CANARY, "deep": [{"a": json.dumps({"b": CANARY})}], CANARY: 1}
    log.write_text(json.dumps(nested) + "\n" + CANARY + "\n" + repr(CANARY.encode()) + "\n\xff\x00" + CANARY[:60])
    raw = {"nvidia-smi": f"\x1b[31m{CANARY}\x1b[0m\r\n", CANARY: CANARY}
    made = write_bundle(smuggled(report), tmp_path / "out", logs=[log], raw=raw, redactor=Redactor(ME))
    texts = {"pasted": made.markdown.read_text(encoding="utf-8")}
    with zipfile.ZipFile(made.archive) as archive:
        for entry in archive.namelist():
            texts[entry] = entry + archive.read(entry).decode()
    found = {(secret, where) for where, text in texts.items() for secret in SECRETS if secret in text}
    assert found == set()


def test_long_logs_and_outputs_are_cut_before_they_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    kept = Redactor.text
    monkeypatch.setattr(Redactor, "text", lambda self, text: looked_at.append(len(text)) or kept(self, text))
    line = json.dumps({"event": "generation", "path": "/home/me-myself/m.gguf", "n": "x" * 60}) + "\n"
    logs = [tmp_path / f"run-{number}.jsonl" for number in range(3)]
    for log in logs:
        log.write_text(line * 30_000)  # three megabytes
    report = diagnose(cases()["h200-server"].machine().facts)
    made = write_bundle(report, tmp_path / "out", logs=logs, raw={"lspci": "x\n" * 900_000}, redactor=Redactor(ME))
    assert sum(looked_at) < 3 << 20  # of eleven megabytes
    with zipfile.ZipFile(made.archive) as archive:
        text = archive.read("logs/run-1.jsonl").decode()
    assert len(text) <= SECTION
    assert text.startswith('{"event":"generation","path":"~/m.gguf"')
    assert text.rstrip().endswith("}")
