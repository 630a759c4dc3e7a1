"""`strata cache`: lists, asks, deletes; and `hf:` names through the whole command line."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from strata.cli import cache as command
from strata.errors import UsageError
from strata.sources.hub.store import store
from strata.sources.kept import kept
from tests.cli.runner import GOLDEN, assert_clear, strata
from tests.sources.hub.server import Hub, start
from tests.sources.test_kept import put

QWEN = (GOLDEN / "qwen3moe.gguf").read_bytes()


class Terminal(io.StringIO):
    """What a person types at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    held = Hub(repos={"maker/tiny-GGUF": {"m.gguf": QWEN}})
    server = start(held)
    monkeypatch.setenv("HF_ENDPOINT", held.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    yield held
    server.shutdown()
    server.server_close()


def test_an_empty_cache_is_said_and_clearing_it_is_fine(tmp_path: Path) -> None:
    assert str(tmp_path / "cache") in strata("cache", "list").stdout
    cleared = strata("cache", "clear")
    assert cleared.returncode == 0
    assert "Nothing" in cleared.stderr


def test_list_and_clear() -> None:
    put("hf", "maker/one", "m.gguf", b"x" * 3_000_000)
    shown = strata("cache", "list")
    assert "2.9 MiB  model       hf:maker/one/m.gguf" in shown.stdout
    document = json.loads(strata("cache", "list", "--json").stdout)
    assert document["nbytes"] == 3_000_000
    assert document["kept"][0]["paths"][0].endswith("m.gguf")
    assert_clear(strata("cache", "clear"), 2, "no terminal to ask on", "--yes")
    assert_clear(strata("cache", "clear", "hf:maker/two", "--yes"), 2, "nothing of this name")
    assert len(kept()) == 1
    cleared = strata("cache", "clear", "hf:maker/one", "--yes", "--json")
    assert json.loads(cleared.stdout)["nbytes"] == 3_000_000
    assert kept() == []


@pytest.mark.parametrize(("typed", "left"), [("\n", 1), ("n\n", 1), ("", 1), ("y\n", 0), ("YES\n", 0)])
def test_a_person_is_asked(typed: str, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put("hf", "maker/one", "m.gguf")
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    if left:
        command.clear_cache([], yes=False, json=False)
    else:
        with pytest.raises(typer.Exit) as ended:
            command.clear_cache([], yes=False, json=False)
        assert ended.value.exit_code == 0
    assert len(kept()) == left
    if left:
        with pytest.raises(UsageError, match="--json asks nobody"):
            command.clear_cache([], yes=False, json=True)


def test_what_the_system_does_not_delete_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    put("hf", "maker/one", "m.gguf")

    def in_use(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "The process cannot access the file because it is being used", str(self))

    monkeypatch.setattr(Path, "unlink", in_use)
    with pytest.raises(typer.Exit) as ended:
        command.clear_cache([], yes=True, json=True)
    assert ended.value.exit_code == 1
    document = json.loads(capsys.readouterr().out)
    assert "being used" in document["refused"][0]
    assert document["deleted"] == []


def test_plan_fetches_the_header_run_the_model(hub: Hub, tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    planned = strata("plan", "hf:maker/tiny-GGUF", "-o", saved)
    assert planned.returncode == 0, planned.stderr
    assert "fits" in planned.stdout
    assert [(each.kind, each.nbytes) for each in kept()] == [("header", 1 << 20)]
    assert strata("doctor", "hf:maker/tiny-GGUF/m.gguf").returncode == 0
    assert len(hub.file_requests()) == 1
    arguments = ["run", "hf:maker/tiny-GGUF", "-p", "Hi", "--no-chat", "--max-tokens", "2", "--seed", "1", "--json"]
    ran = strata(*arguments, "--plan", saved)  # made from the header alone
    assert json.loads(ran.stdout)["stats"]["generated_tokens"] == 2
    assert [(each.kind, each.nbytes) for each in kept()] == [("model", len(QWEN))]


@pytest.mark.parametrize("command", [("run", "-p", "Hi", "--no-chat"), ("bench",)])
def test_what_cannot_run_is_refused_by_its_header(hub: Hub, command: tuple[str, ...]) -> None:
    """Too large, or of an unknown kind: nothing but the first megabyte is fetched for that."""
    name, *rest = command
    small = strata(name, "hf:maker/tiny-GGUF", *rest, "--ram-budget", "64MiB", "--device", "cpu")
    assert_clear(small, 1, "are missing", "tiny-qwen3moe")
    assert [each.kind for each in kept()] == ["header"]
    hub.repos["maker/other-GGUF"] = {"m.gguf": QWEN.replace(b"qwen3moe", b"qwen9moe")}
    assert_clear(strata(name, "hf:maker/other-GGUF", *rest), 1, "'qwen9moe' is not implemented")
    assert [each.kind for each in kept()] == ["header", "header"]
    assert not any(span is None or int(span.split("-")[1]) >= 1 << 20 for span in hub.file_requests())
    fetched = strata(
        name,
        "hf:maker/tiny-GGUF",
        *rest,
        "--device",
        "cpu",
        *(("--max-tokens", "1") if rest else ("--json", "-p", "4", "-n", "1")),
    )
    assert fetched.returncode == 0, fetched.stderr
    assert "By its header, tiny-qwen3moe fits. Its 2.5 MiB are fetched." in fetched.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_keeps_what_came_and_the_same_command_goes_on(hub: Hub) -> None:
    hub.faults = ["", "stall"]  # the header comes, the model does not
    arguments = ["run", "hf:maker/tiny-GGUF", "-p", "Hi", "--no-chat", "--max-tokens", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "strata", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        while not any(path.stat().st_size > len(QWEN) // 3 for path in store("hf", "maker/tiny-GGUF").parts()):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    hub.go_on.set()
    assert process.returncode == 130
    assert b"Traceback" not in said
    (part,) = (each for each in kept() if each.kind != "header")
    assert part.kind == "unfinished"
    assert strata(*arguments).returncode == 0
    assert hub.file_requests()[-1] == f"bytes={part.nbytes}-{len(QWEN) - 1}"
    assert [each.kind for each in kept()] == ["model"]


def test_errors_of_the_hub_are_clear(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_clear(strata("run", "hf:maker/tinny-GGUF", "-p", "x"), 2, "no such repository")
    hub.repos["maker/tiny-GGUF"]["n.gguf"] = QWEN
    several = strata("plan", "hf:maker/tiny-GGUF")
    assert_clear(several, 2, "it holds 2 models", "hf:maker/tiny-GGUF/n.gguf 2.5 MiB")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_clear(strata("plan", "hf:maker/tiny-GGUF"), 1, "HF_HUB_OFFLINE")


@pytest.mark.parametrize("address", ["http://[::1", "foo bar", "localhost:80", "https://"])
def test_an_endpoint_that_is_no_address_is_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert_clear(strata("plan", "hf:maker/tiny-GGUF"), 2, "HF_ENDPOINT", "is no address")
