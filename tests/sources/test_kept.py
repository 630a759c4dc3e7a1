"""What the cache holds of ours, and that nothing else is ever deleted."""

import os
from pathlib import Path

import pytest

from strata.folders import cache_folder
from strata.sources import demo
from strata.sources.hub.choose import HubFile
from strata.sources.hub.store import HEADERS, LOCK, MODELS, Store, store
from strata.sources.kept import Kind, delete, kept, named


def put(kind: str, repo: str, path: str, data: bytes = b"GGUF") -> Store:
    into = store(kind, repo)
    into.path(path).parent.mkdir(parents=True, exist_ok=True)
    part = into.part(HubFile(path, len(data), "0" * 64))
    part.write_bytes(data)
    into.put(HubFile(path, len(data), "0" * 64), part)
    return into


@pytest.fixture
def full() -> Path:
    """A cache with one of everything, and with what others put there."""
    put(MODELS, "maker/one", "m.gguf")
    put(MODELS, "maker/one", "Q4/n-00001-of-00002.gguf")
    put(MODELS, "maker/one", "Q4/n-00002-of-00002.gguf")
    put(MODELS, "maker/one-more", "x-00001-of-00002.gguf")
    put(HEADERS, "maker/two", "m.gguf")
    part = store(MODELS, "maker/one").part(HubFile("big.gguf", 100, "a" * 64))
    part.write_bytes(b"half")
    root = cache_folder()
    (root / demo.MODEL).write_bytes(b"demo")
    left = root / "demo-left"
    left.mkdir()
    (left / "wheel").write_bytes(b"123456")
    os.utime(left, (0, 0))
    (root / "demo-running").mkdir()
    (root / "kernels").mkdir()
    (root / "kernels" / "a.kernel").write_bytes(b"k")
    for foreign in (
        demo.WHEEL,
        "hf/maker/one/mine.gguf",
        "hf/maker/one/my.part",
        "hf/maker/two.gguf",
        "kernels/notes.txt",
        "demo-notes",
    ):
        (root / foreign).write_bytes(b"not Strata's")
    return root


def test_everything_of_ours_is_listed_with_its_bytes(full: Path) -> None:
    assert [(each.name, each.kind, each.nbytes) for each in kept()] == [
        ("demo", Kind.MODEL, 4),
        ("demo", Kind.UNFINISHED, 6),
        ("hf:maker/one-more/x-00001-of-00002.gguf", Kind.UNFINISHED, 4),
        ("hf:maker/one/Q4/n-00001-of-00002.gguf", Kind.MODEL, 8),
        ("hf:maker/one/big.gguf", Kind.UNFINISHED, 4),
        ("hf:maker/one/m.gguf", Kind.MODEL, 4),
        ("hf:maker/two/m.gguf", Kind.HEADER, 4),
        ("kernels", Kind.KERNELS, 1),
    ]


def test_clearing_leaves_what_is_not_ours_and_no_empty_folder(full: Path) -> None:
    for each in kept():
        delete(each)
    assert kept() == []
    left = sorted(path.relative_to(full).as_posix() for path in full.rglob("*") if path.is_file())
    foreign = [demo.WHEEL, "demo-notes", "hf/maker/one/mine.gguf", "hf/maker/one/my.part", "hf/maker/two.gguf"]
    foreign.append("kernels/notes.txt")
    assert left == sorted(foreign)
    assert not (full / "hf-headers").exists()
    assert not (full / "hf" / "maker" / "one-more").exists()
    assert (full / "demo-running").is_dir()


def test_a_link_is_removed_and_what_it_points_to_stays(full: Path, tmp_path: Path) -> None:
    model = tmp_path / "elsewhere.gguf"
    kept_file = store(MODELS, "maker/one").path("m.gguf")
    kept_file.rename(model)
    kept_file.symlink_to(model)
    (one,) = named(kept(), "hf:maker/one/m.gguf")
    delete(one)
    assert model.is_file()
    assert not kept_file.is_symlink()


def test_names_cover_a_model_or_a_repository_and_no_neighbour(full: Path) -> None:
    assert len(named(kept(), "hf:maker/one")) == 3
    assert len(named(kept(), "hf:maker/one/m.gguf")) == 1
    assert len(named(kept(), "hf:maker")) == 5
    assert named(kept(), "hf:maker/on") == []


def test_what_is_just_being_fetched_stays(full: Path) -> None:
    import filelock

    (model,) = named(kept(), "hf:maker/one/m.gguf")
    with (
        filelock.FileLock(store(MODELS, "maker/one").folder / LOCK),
        pytest.raises(OSError, match="just fetching"),
    ):
        delete(model)
    assert model.paths[0].is_file()
