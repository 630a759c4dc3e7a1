"""Streams that are closed, full or left, and signals: the commands as processes among others."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import MODEL, assert_clear, strata


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_ends_cleanly_and_says_where() -> None:
    # the fullest context that the model has: seconds of work, so the answer does not end by itself first
    arguments = ["run", MODEL, "-p", "Hello", "--no-chat", "--temp", "0", "--max-context", "4096"]
    command = [sys.executable, "-m", "strata", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        process.stdout.read(1)  # the first text: it is generating
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"stopped by Ctrl-C" in said
    assert b"Traceback" not in said


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m strata plan {MODEL} --json | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == "{"
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_what_stdout_cannot_show_or_take_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", MODEL, "-p", "Bären \N{BEAR FACE}", "--no-chat", "--max-tokens", "3", "--temp", "0"]
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ascii_only = strata(*arguments)
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert ascii_only.stdout.isascii()
    if not Path("/dev/full").exists():
        return
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "strata", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert "No space left" in result.stderr
    assert "bug of its own" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="holds a pipe open")
def test_a_failed_preflight_does_not_wait_for_stdin() -> None:
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-m", "strata", "run", MODEL, "--ram-budget", "100MiB"]
        result = subprocess.run(command, stdin=reading, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(reading)
        os.close(writing)
    assert_clear(result, 1, "does not fit")


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_being_told_to_end_is_obeyed_cleanly(name: str, code: int) -> None:
    command = [sys.executable, "-m", "strata", "run", MODEL, "-p", "Hello", "--no-chat", "--temp", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.read(1)
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=30)
    assert process.returncode in (code, 0)  # 0: it had come to the end of the context
    assert "Traceback" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors in a shell")
@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), ("<&-", 0), ("<&- >&- 2>&-", 0)])
def test_closed_streams_are_no_bug(closed: str, code: int) -> None:
    command = f"{sys.executable} -m strata run {MODEL} -p Hi --no-chat --max-tokens 2 {closed}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert "bug of its own" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "run --help", "version", f"plan {MODEL}"])
def test_a_full_disk_under_stdout_is_said(arguments: str) -> None:
    command = f"{sys.executable} -m strata {arguments} > /dev/full"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert_clear(result, 1, "No space left")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_an_interrupted_command_is_one_json_document_too() -> None:
    command = [sys.executable, "-m", "strata", "run", MODEL, "--no-chat", "--json"]  # it waits for a prompt on stdin
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8)
        os.killpg(process.pid, signal.SIGINT)
        document, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert json.loads(document)["error"]["found"] == "interrupted by Ctrl-C"
