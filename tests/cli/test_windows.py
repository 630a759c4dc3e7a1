"""What can be shown of Windows without Windows: code pages, pipes, paths; see docs/windows.md for what cannot."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
import typer
from rich.console import Console

from strata import folders
from strata.cli import error_text, output, progress
from strata.cli.error_text import read_error_text
from strata.cli.streams import prepare_streams
from strata.errors import ExitCode
from strata.sources.hub.name import is_plain
from tests.cli.runner import GOLDEN, MODEL, assert_clear, strata

MACHINE = str(GOLDEN.parent / "machines" / "seed-000-broken-context.json")


def stream(encoding: str, data: bytes = b"", *, terminal: bool = False) -> io.TextIOWrapper:
    wrapped = io.TextIOWrapper(io.BytesIO(data), encoding=encoding)
    wrapped.isatty = lambda: terminal  # type: ignore[method-assign]
    return wrapped


def use_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the standard streams by pipes in a western code page (in the test: pytest sets its own before it)."""
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream("cp1252", "\N{BOM}Bären".encode() if name == "stdin" else b""))


@pytest.mark.parametrize("page", ["cp1252", "cp437", "cp932", "ascii"])
@pytest.mark.parametrize(
    "command", [["--help"], ["plan", MODEL], ["doctor", "--facts", MACHINE], ["cache", "list"], ["version", "-v"]]
)
def test_nothing_is_lost_in_a_code_page(page: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", page)
    result = subprocess.run([sys.executable, "-m", "strata", *command], capture_output=True, check=False)
    text = result.stdout.decode(page)
    assert text.strip()
    assert "?" not in text.replace("? UNKNOWN", "").replace(" ?  ", "")
    assert "Traceback" not in result.stderr.decode(page)


def test_pipes_are_utf8_and_a_mark_in_front_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    use_pipes(monkeypatch)
    prepare_streams(windows=True)
    assert sys.stdin.read() == "Bären"
    print("日本語 \N{BEAR FACE}", flush=True)
    assert sys.stdout.buffer.getvalue().decode() == "日本語 \N{BEAR FACE}\n"  # type: ignore[attr-defined]


def test_what_a_person_chose_and_other_systems_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    use_pipes(monkeypatch)
    prepare_streams(windows=False)
    assert sys.stdout.encoding == "cp1252"
    assert sys.stdout.errors == "replace"
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    prepare_streams(windows=True)
    assert sys.stdout.encoding == "cp1252"


def test_a_console_keeps_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.setattr(sys, "stdout", stream("utf-16-le", terminal=True))
    prepare_streams(windows=True)
    assert sys.stdout.encoding == "utf-16-le"
    assert sys.stdout.errors == "replace"


def test_windows_word_for_a_reader_that_left(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    @output.boundary
    def command() -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(output, "_reader_left", lambda: output.stop(ExitCode.OK))  # it would close our own stdout
    for windows, code in ((True, ExitCode.OK), (False, ExitCode.FAILED)):
        monkeypatch.setattr(output, "_WINDOWS", windows)
        with pytest.raises(typer.Exit) as ended:
            command()
        assert ended.value.exit_code == code


def test_progress_turns_in_ascii_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("cp437", "utf-8"):
        written = stream(encoding)
        written.reconfigure(errors="strict")
        monkeypatch.setattr(sys, "stderr", written)
        # as in a console without VT: rich is told to call Windows instead of writing escapes; here it may write
        console = Console(file=written, force_terminal=True, width=80, legacy_windows=False)
        monkeypatch.setattr(progress, "err", lambda console=console: console)
        with progress.steps() as step:
            step("fetching maker/tiny-GGUF", 1 << 20, 4 << 20)
        written.flush()
        text = written.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert "fetching maker/tiny-GGUF" in text
        assert "1 MiB of 4 MiB" in text


def test_blanks_other_scripts_and_long_paths(tmp_path: Path) -> None:
    folder = tmp_path / "Mein Ordner (日本語)"
    while len(str(folder)) < 300:
        folder /= "a rather long name of a folder"
    folder.mkdir(parents=True)
    model = folder / "my model.gguf"
    model.write_bytes(Path(MODEL).read_bytes())
    saved = folder / "the plan.json"
    assert strata("plan", str(model), "-o", str(saved)).returncode == 0
    ran = strata("run", str(model), "--plan", str(saved), "-p", "Hi", "--no-chat", "--max-tokens", "1", "--json")
    assert json.loads(ran.stdout)["stats"]["generated_tokens"] == 1
    assert_clear(strata("plan", str(folder / "my modle.gguf")), 2, "Did you mean", "my model.gguf?")


def test_files_of_a_hub_that_windows_cannot_hold_are_not_fetched() -> None:
    for path in ("aux.gguf", "NUL", "a/com1.txt", "a:b.gguf", "a\\b.gguf", "m.gguf.", "a /m.gguf", "m?.gguf", "a//b"):
        assert not is_plain(path), path
    for path in ("m.gguf", "Q4_K_M/m-00001-of-00002.gguf", "auxiliary.gguf", "a.b/c d.gguf", "console.gguf"):
        assert is_plain(path), path


def test_one_cache_folder_whatever_windows_puts_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    from platformdirs.windows import Windows

    def windows(appname: str, appauthor: str | bool | None = None) -> Path:
        return Path(Windows(appname=appname, appauthor=appauthor).user_cache_dir)  # type: ignore[arg-type]

    monkeypatch.delenv("STRATA_CACHE_DIR")
    monkeypatch.setenv("LOCALAPPDATA", "C:/Users/somebody/AppData/Local")
    monkeypatch.setattr("platformdirs.windows.get_win_folder", lambda name: os.environ["LOCALAPPDATA"])
    monkeypatch.setattr(platformdirs, "user_cache_path", windows)
    monkeypatch.setattr(folders, "_can_be_written", lambda folder: True)
    assert folders.cache_folder() == Path("C:/Users/somebody/AppData/Local/strata/Cache")


def test_a_log_named_with_either_slash_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine log").write_text("out of memory")
    monkeypatch.setattr(error_text.os, "sep", "\\")
    monkeypatch.setattr(error_text.os, "altsep", "/")
    assert read_error_text(f"{tmp_path}/engine log").text == "out of memory"
    assert read_error_text("out of memory").text == "out of memory"


def test_py_m_strata_is_called_strata() -> None:
    assert "Usage: strata plan" in strata("plan", "--help").stdout
