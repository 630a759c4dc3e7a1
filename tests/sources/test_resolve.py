"""What MODEL stands for."""

from pathlib import Path

import pytest

from strata.errors import UsageError
from strata.folders import cache_folder
from strata.gguf.reader import open_gguf
from strata.sources import demo
from strata.sources.hub.choose import HubFile
from strata.sources.hub.store import MODELS, store
from strata.sources.resolve import resolve


def ignore(what: str, done: int | None, total: int | None) -> None:
    pass


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path / "model.gguf"), progress=ignore) == tmp_path / "model.gguf"


def test_demo_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path))
    (tmp_path / demo.MODEL).touch()
    assert resolve("demo", progress=ignore) == tmp_path / demo.MODEL


def test_a_name_of_a_hub_is_kept_by_its_name(tmp_path: Path) -> None:
    kept = store(MODELS, "owner/repo")
    kept.folder.mkdir(parents=True)
    (tmp_path / "part").write_bytes(b"GGUF")
    kept.put(HubFile("m.gguf", 4), tmp_path / "part")
    assert resolve("hf:owner/repo/m.gguf", progress=ignore) == kept.path("m.gguf")
    with pytest.raises(UsageError, match="hf:owner/repo"):
        resolve("hf:owner", progress=ignore)


def test_a_mistyped_path_is_answered_with_near_ones(tmp_path: Path) -> None:
    (tmp_path / "qwen3-30b.gguf").touch()
    with pytest.raises(UsageError) as refused:
        open_gguf(resolve(str(tmp_path / "qwen3-3b.gguf"), progress=ignore))
    assert str(tmp_path / "qwen3-30b.gguf") in refused.value.remedy


def test_a_mistyped_folder_is_answered_with_near_ones(tmp_path: Path) -> None:
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "m.gguf").touch()
    for path in ("modles/m.gguf", "models/m.gguf", "models/qwne/m.gguf", "models/qwen/M.gguf", "models/qwen/m"):
        with pytest.raises(UsageError) as refused:
            open_gguf(tmp_path / path)
        assert str(tmp_path / "models" / "qwen" / "m.gguf") in refused.value.remedy, path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("dmeo", "demo"),
        ("Demo", "demo"),
        ("maker/tiny-GGUF", "hf:maker/tiny-GGUF"),
        ("https://huggingface.co/maker/tiny-GGUF", "hf:maker/tiny-GGUF"),
        ("https://hf.co/maker/tiny-GGUF/tree/main", "hf:maker/tiny-GGUF"),
        ("https://huggingface.co/maker/tiny/resolve/main/Q4/m.gguf?download=true", "hf:maker/tiny/Q4/m.gguf"),
    ],
)
def test_what_is_no_path_is_guessed(typed: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        resolve(typed, progress=ignore)
    assert refused.value.remedy == f"Did you mean {meant}?"
    if "/" not in typed:
        (tmp_path / typed).touch()
        assert resolve(typed, progress=ignore) == Path(typed)


def test_an_address_of_elsewhere_is_no_path() -> None:
    with pytest.raises(UsageError, match="address"):
        resolve("https://example.org/m.gguf", progress=ignore)


@pytest.mark.parametrize("path", ["models/m.gguf", "m.gguf", "a\0b", "x" * 5000, "c:/models/m.gguf"])
def test_other_paths_are_left_alone(path: str) -> None:
    assert resolve(path, progress=ignore) == Path(path)


def test_the_cache_folder_is_the_chosen_one_or_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("STRATA_CACHE_DIR")
    assert cache_folder().is_absolute()
    assert "strata" in cache_folder().parts
