"""`hf:owner/repo[/file]` against a hub on this machine, sound and misbehaving."""

import hashlib
import multiprocessing
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from strata.errors import ModelFileError, ModelUnavailable, StrataError, UsageError
from strata.gguf.reader import open_gguf
from strata.sources.hub import download
from strata.sources.hub.model import hub_model
from strata.sources.hub.refusals import Unreachable
from strata.sources.hub.store import HEADERS, MODELS, store
from tests.gguf_maker import gguf_bytes, moe_model
from tests.sources.hub.server import COMMIT, Hub

REPO = "maker/tiny-GGUF"
NAME = f"hf:{REPO}"
MODEL = gguf_bytes(*moe_model())
Steps = list[tuple[str, int | None, int | None]]


def fetch(name: str = NAME, *, header_only: bool = False, steps: Steps | None = None) -> Path:
    return hub_model(
        name, header_only=header_only, progress=lambda *step: steps.append(step) if steps is not None else None
    )


def refused(kind: type[StrataError], name: str = NAME, *, header_only: bool = False) -> StrataError:
    with pytest.raises(kind) as error:
        fetch(name, header_only=header_only)
    return error.value


def split_set() -> dict[str, bytes]:
    """Two shards of one model."""
    keys, tensors = moe_model()
    files = {}
    for number, part in enumerate((tensors[:5], tensors[5:])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        files[f"Q4/m-{number + 1:05}-of-00002.gguf"] = gguf_bytes(keys | split if number == 0 else split, part)
    return files


def test_the_one_model_of_a_repository_is_fetched_once_and_used_without_the_hub(hub: Hub) -> None:
    hub.repos[REPO] = {"README.md": b"hello", "m.gguf": MODEL, "mmproj-f16.gguf": b"GGUF..."}
    steps: Steps = []
    path = fetch(steps=steps)
    assert path.read_bytes() == MODEL
    assert [name for name in (item.name for item in path.parent.iterdir()) if name.startswith("m")] == ["m.gguf"]
    assert steps[-1] == ("fetching the model", len(MODEL), len(MODEL))
    hub.requests.clear()
    assert fetch(f"{NAME}/m.gguf") == path
    assert hub.requests == []
    assert fetch() == path
    assert hub.file_requests() == []


def test_a_split_set_comes_whole_with_one_count_of_bytes(hub: Hub) -> None:
    hub.repos[REPO] = split_set()
    steps: Steps = []
    path = fetch(f"{NAME}/Q4/m-00002-of-00002.gguf", steps=steps)
    assert path.name == "m-00001-of-00002.gguf"
    with open_gguf(path) as model:
        assert len(model.paths) == 2
    counts = [done for what, done, _ in steps if what == "fetching the model"]
    assert counts == sorted(counts)  # type: ignore[type-var]
    assert counts[-1] == steps[-1][2] == sum(map(len, hub.repos[REPO].values()))


@pytest.mark.parametrize("fault", ["cut", "503", "empty", "no-range"])
def test_a_transfer_that_stumbles_goes_on_where_it_was(hub: Hub, fault: str) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.faults = ["cut", fault]
    assert fetch().read_bytes() == MODEL
    assert hub.faults == []
    assert f"bytes={len(MODEL) // 2}-{len(MODEL) - 1}" in hub.file_requests()


def test_what_came_before_an_end_is_not_fetched_again(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.faults = ["cut"] + ["503"] * 3
    error = refused(ModelUnavailable)
    assert "3 times in a row" in error.found
    assert "503" in error.found
    (part,) = store(MODELS, REPO).parts()
    assert part.read_bytes() == MODEL[: len(MODEL) // 2]
    hub.requests.clear()
    assert fetch().read_bytes() == MODEL
    assert hub.file_requests() == [f"bytes={len(MODEL) // 2}-{len(MODEL) - 1}"]
    assert store(MODELS, REPO).parts() == []


def test_a_part_of_another_version_is_not_continued(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL[:-8] + b"earlier "}
    hub.faults = ["cut"] + ["503"] * 3
    refused(ModelUnavailable)
    hub.repos[REPO] = {"m.gguf": MODEL}
    assert fetch().read_bytes() == MODEL


def test_large_files_come_in_segments(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_SEGMENT", 10_000)
    hub.repos[REPO] = {"m.gguf": MODEL}
    assert fetch().read_bytes() == MODEL
    assert hub.file_requests()[1] == "bytes=10000-19999"


@pytest.mark.parametrize("in_git", [False, True])
def test_wrong_bytes_are_seen_and_nothing_of_them_kept(hub: Hub, in_git: bool) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.in_git = in_git
    hub.faults = ["bytes"]
    error = refused(ModelUnavailable)
    assert "checksum" in error.found
    assert store(MODELS, REPO).parts() == []
    assert not store(MODELS, REPO).path("m.gguf").exists()
    assert fetch().read_bytes() == MODEL


@pytest.mark.parametrize("checksum", ["", "../../../../evil", "0" * 63])
def test_without_a_checksum_nothing_is_fetched(hub: Hub, checksum: str) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.checksum = checksum
    assert "no checksum" in refused(ModelUnavailable).found
    assert hub.file_requests() == []


def test_another_size_than_listed_is_refused(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.faults = ["size"]
    error = refused(ModelUnavailable)
    assert f"{len(MODEL):,}" in error.found
    assert f"{len(MODEL) + 1:,}" in error.found


def test_a_damaged_part_costs_a_fetch_and_no_more(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.faults = ["cut"] + ["503"] * 3
    refused(ModelUnavailable)
    (part,) = store(MODELS, REPO).parts()
    part.write_bytes(bytes(len(MODEL) + 1))  # longer than the file
    assert fetch().read_bytes() == MODEL


def test_free_space_is_looked_at_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    usage = shutil.disk_usage(Path.cwd())._replace(free=len(MODEL) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    error = refused(ModelUnavailable)
    assert "are free" in error.found
    assert "STRATA_CACHE_DIR" in error.remedy
    assert hub.file_requests() == []


def test_a_disk_that_fills_up_is_said(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    error = refused(ModelUnavailable)
    assert "No space left" in error.found
    assert "goes on where this ended" in error.remedy


def test_several_models_are_listed_with_sizes_and_what_to_type(hub: Hub) -> None:
    hub.repos[REPO] = {"m-Q8_0.gguf": MODEL * 20, "m-Q4_0.gguf": MODEL} | split_set()
    error = refused(UsageError)
    lines = error.found.splitlines()
    assert lines[0] == "it holds 3 models:"
    assert f"{NAME}/m-Q4_0.gguf" in lines[1]  # the smallest
    assert f"{NAME}/Q4/m-00001-of-00002.gguf" in lines[2]
    assert "in 2 files" in lines[2]
    assert "MiB" in lines[3]
    assert f"{NAME}/m-Q4_0.gguf" in error.remedy
    assert "Did you mean" in refused(UsageError, f"{NAME}/m-Q4_O.gguf").remedy
    assert f"{NAME}/m-Q8_0.gguf" in refused(UsageError, f"{NAME}/q8_0").remedy
    assert "it, but:" in refused(UsageError, f"{NAME}/zzz").found


def test_a_repository_without_a_model_is_said(hub: Hub) -> None:
    hub.repos[REPO] = {"model.safetensors": b"x", "README.md": b"y"}
    error = refused(ModelUnavailable)
    assert "no .gguf file (2 files" in error.found
    shards = split_set()
    hub.repos[REPO] = {min(shards): MODEL}
    assert "1 of 2 shards" in refused(ModelUnavailable).found


def test_hostile_paths_are_not_files(hub: Hub, tmp_path: Path) -> None:
    hub.repos[REPO] = {"../../../evil.gguf": MODEL, "a/../../b.gguf": MODEL, "C:\\evil.gguf": MODEL}
    assert "no .gguf file (0 files" in refused(ModelUnavailable).found


def test_a_mistyped_repository(hub: Hub) -> None:
    error = refused(UsageError, "hf:maker/tinny-GGUF")
    assert "no such repository" in error.found
    assert f"{hub.url}/maker/tinny-GGUF" in error.remedy
    for name in ("hf:tiny", "hf:", "hf:a/b/../c.gguf", "hf:../b", "hf:a/b/c:d"):
        assert "hf:owner/repo" in refused(UsageError, name).remedy


def test_a_gated_repository_is_explained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    hub.gated.add(REPO)
    error = refused(ModelUnavailable)
    assert "gated" in error.found
    assert f"{hub.url}/{REPO}" in error.remedy
    assert "HF_TOKEN" in error.remedy
    monkeypatch.setenv("HF_TOKEN", "other")
    assert "account of your token" in refused(ModelUnavailable).found
    monkeypatch.setenv("HF_TOKEN", "good")
    assert fetch().read_bytes() == MODEL


@pytest.mark.parametrize(("status", "word"), [(503, "503"), (429, "429"), (401, "token"), (0, "as a hub does")])
def test_a_hub_in_trouble(hub: Hub, status: int, word: str) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    path = fetch()
    hub.listing_status = status
    if status != 401:
        assert fetch() == path  # what is here is used
    assert word in refused(ModelUnavailable, f"{NAME}/other.gguf").found


def test_without_a_network_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL, "n.gguf": MODEL}
    path = fetch(f"{NAME}/m.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(f"{NAME}/m.gguf") == path
    assert fetch() == path  # the one that is here
    assert "HF_HUB_OFFLINE" in refused(Unreachable, f"{NAME}/n.gguf").found
    assert "HF_HUB_OFFLINE" in refused(Unreachable, "hf:maker/other").found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert fetch() == path
    assert "cannot be reached" in refused(Unreachable, f"{NAME}/n.gguf").found


def test_the_cache_that_other_tools_share_is_used(hub: Hub) -> None:
    folder = Path(constants.HF_HUB_CACHE) / "models--maker--tiny-GGUF"
    for path, data in split_set().items():
        file = folder / "snapshots" / COMMIT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    path = fetch(f"{NAME}/Q4/m-00001-of-00002.gguf")
    assert path.is_relative_to(folder)
    assert hub.requests == []


def test_a_file_that_was_put_there_or_changed_is_not_taken_for_the_model(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    kept = store(MODELS, REPO)
    path = fetch()
    path.write_bytes(MODEL[:100])
    assert fetch() == path
    assert path.read_bytes() == MODEL
    (kept.folder / "fetched.json").write_text("{")
    assert kept.files() == []
    assert "did not fetch" in refused(ModelUnavailable).found  # nor is it written over
    assert path.read_bytes() == MODEL


def test_the_header_alone_is_fetched_to_plan(hub: Hub) -> None:
    keys, tensors = moe_model()
    keys["general.description"] = "x" * (5 << 20)  # longer than the first two steps
    data = gguf_bytes(keys, tensors) + bytes(40 << 20)
    hub.repos[REPO] = {"m.gguf": data}
    path = fetch(header_only=True)
    with open_gguf(path, header_only=True) as model:
        assert len(model.tensors) == len(tensors)
    assert path.stat().st_size == 16 << 20
    hub.requests.clear()
    assert fetch(f"{NAME}/m.gguf", header_only=True) == path
    assert hub.requests == []
    assert fetch() != path  # to run, the whole is needed
    assert fetch(f"{NAME}/m.gguf", header_only=True) == fetch()  # and serves for planning, too


def test_headers_of_a_split_set_and_what_is_no_header(hub: Hub) -> None:
    hub.repos[REPO] = split_set()
    hub.faults = ["cut", "503"]
    with open_gguf(fetch(header_only=True), header_only=True) as model:
        assert len(model.paths) == 2
    assert len(store(HEADERS, REPO).files()) == 2
    hub.repos["maker/page"] = {"m.gguf": b"<html>" * 1_000_000}
    hub.requests.clear()
    assert "web page" in refused(ModelFileError, "hf:maker/page", header_only=True).found
    assert len(hub.file_requests()) == 1
    hub.faults = ["503"] * 3
    assert "503" in refused(ModelUnavailable, "hf:maker/page", header_only=True).found


def _hold(folder: str, ready: object, go: object) -> None:
    import filelock

    with filelock.FileLock(Path(folder) / "fetching.lock"):
        ready.set()  # type: ignore[attr-defined]
        go.wait(30)  # type: ignore[attr-defined]


def test_two_at_once_wait_for_each_other(hub: Hub) -> None:
    hub.repos[REPO] = {"m.gguf": MODEL}
    context = multiprocessing.get_context("spawn")
    ready, go = context.Event(), context.Event()
    folder = store(MODELS, REPO).folder
    folder.mkdir(parents=True)
    holder = context.Process(target=_hold, args=(str(folder), ready, go))
    holder.start()
    try:
        assert ready.wait(30)
        steps: Steps = []

        def progress(what: str, done: int | None, total: int | None) -> None:
            steps.append((what, done, total))
            if "waiting" in what:
                go.set()

        path = hub_model(NAME, header_only=False, progress=progress)
    finally:
        go.set()
        holder.join()
    assert any(what.startswith("another Strata") for what, _, _ in steps)
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(MODEL).digest()
