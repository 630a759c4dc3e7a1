"""The commands as processes: exit codes, one JSON document, answers on stdout and all else on stderr."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import GOLDEN, MODEL, assert_clear, strata

HEAVY = ("numpy", "gguf", "tokenizers", "jinja2", "pynvml", "cupy", "msgspec")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, contextlib\n"
        "from strata.cli.app import app\n"
        "with contextlib.suppress(SystemExit): app(['--help'])\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    for command in ("run", "plan", "doctor", "version"):
        assert command in result.stdout


def test_run_answers_on_stdout_and_says_the_rest_on_stderr() -> None:
    result = strata("run", MODEL, "-p", "Hello", "--no-chat", "--max-tokens", "5", "--temp", "0", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n")
    assert "fits" in result.stderr
    assert "expert_slots" in result.stderr
    assert "planned" in result.stderr
    assert "difference" in result.stderr
    assert "(expected " in result.stderr
    again = strata("run", MODEL, "--no-chat", "--max-tokens", "5", "--temp", "0", stdin="Hello")
    assert again.stdout == result.stdout  # stdin is a prompt like -p


def test_run_json_is_one_document(tmp_path: Path) -> None:
    arguments = ["run", MODEL, "-p", "Hello", "--no-chat", "--max-tokens", "4", "--seed", "7", "--json"]
    document = json.loads(strata(*arguments).stdout)
    assert document["seed"] == 7
    assert document["stats"]["generated_tokens"] == 4
    assert document["stats"]["stop"] == "length"
    assert document["memory"]["peak_bytes"] <= document["memory"]["planned_bytes"]
    for row in document["after_loading"]:
        assert 0 <= row["difference_bytes"] == row["planned_bytes"] - row["taken_bytes"]
    assert [row["memory"] for row in document["after_loading"]][-1] == "whole process"
    for speed in document["speed"].values():
        slow, fast = speed["expected"]
        assert 0 < slow < fast <= 2.000001 * slow
        assert speed["measured"] > 0
    assert document["plan"]["feasible"] is True
    assert Path(document["log"]).is_file()
    assert json.loads(strata(*arguments).stdout)["text"] == document["text"]  # same seed, same answer


def test_plan_is_saved_and_followed(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = strata("plan", MODEL, "--max-context", "128", "--expert-cache", "3", "-o", str(saved))
    assert result.returncode == 0, result.stderr
    assert "fits" in result.stdout.splitlines()[0]
    run = strata("run", MODEL, "--plan", str(saved), "-p", "Hi", "--no-chat", "--max-tokens", "3", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["plan"]["experts"]["slots"] == 3
    assert document["stats"]["evictions"] > 0
    other = strata("run", str(GOLDEN / "llama.gguf"), "--plan", str(saved), "-p", "Hi", "--no-chat")
    assert_clear(other, 1, "error:", "found", "do")


def test_a_plan_that_does_not_fit_is_an_answer() -> None:
    shown = strata("plan", MODEL, "--ram-budget", "100MiB")
    assert shown.returncode == 1
    assert "does not fit" in shown.stdout.splitlines()[0]
    assert "--ram-budget" in shown.stdout
    refused = strata("run", MODEL, "--ram-budget", "100MiB", "-p", "Hi", "--no-chat")
    assert_clear(refused, 1, "does not fit", "--ram-budget")
    assert refused.stdout == ""


def test_doctor_gives_a_verdict_first_and_json_alone() -> None:
    result = strata("doctor", MODEL, "--json")
    document = json.loads(result.stdout)
    assert result.returncode == document["verdict"]["exit_code"]
    assert document["plan"]["model"]["architecture"] == "qwen3moe"
    shown = strata("doctor")
    assert shown.stdout.splitlines()[0].strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "no-such.gguf", "-p", "x"], ["no-such.gguf", "there is no such file"]),
        (["run", "https://host/model.gguf", "-p", "x"], ["this is an address"]),
        (["run", "x" * 5000, "-p", "x"], ["no file can have this path"]),
        (["run", MODEL, "-p", " "], ["the prompt is empty"]),
        (["run", MODEL, "-p", "x", "--temp", "-1"], ["--temp"]),
        (["run", MODEL, "-p", "x", "--kv", "q4"], ["--kv"]),
        (["run", MODEL, "-p", "x", "--vram-budget", "8"], ["has no unit"]),
        (["run", MODEL, "-p", "x", "--no-chat", "--system", "y"], ["--system"]),
        (["run", MODEL, "-p", "x", "--no-chat", "--max-context", "9999999"], ["context"]),
        (["plan"], ["MODEL"]),
        (["fly"], ["fly"]),
        (["doctor", "--only", "STR-NO-SUCH"], ["STR-NO-SUCH"]),
    ],
)
def test_wrong_use_is_said_and_exits_with_2(arguments: list[str], words: list[str]) -> None:
    result = strata(*arguments)
    assert_clear(result, 2, *words)
    assert result.stdout == ""


def test_errors_are_json_too_when_json_was_asked_for() -> None:
    result = strata("run", "no-such.gguf", "-p", "x", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["found"] == "there is no such file"


@pytest.mark.parametrize("wrong", [["--temp", "abc"], ["--ram-budget", "8"], ["--no-such-option"]])
def test_wrong_options_are_json_too(wrong: list[str]) -> None:
    result = strata("run", MODEL, "-p", "x", "--json", *wrong)
    assert result.returncode == 2
    assert wrong[0] in json.loads(result.stdout)["error"]["found"]


def test_a_model_that_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "page.gguf"
    broken.write_text("<!DOCTYPE html><html></html>")
    assert_clear(strata("run", str(broken), "-p", "x"), 1, "web page")


def test_a_tokenizer_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(Path(MODEL).read_bytes().replace(b"qwen2", b"other", 1))  # its pre-tokenizer
    result = strata("run", str(model), "--no-chat", "-p", "Hello")
    assert_clear(result, 1, "its pre-tokenizer is 'other'", "Supported: qwen2, ")
    assert result.stderr.startswith("error: read the model's tokenizer")  # before anything was planned


def test_thinking_cannot_be_switched_without_a_chat() -> None:
    assert_clear(strata("run", MODEL, "--no-chat", "--no-think", "-p", "Hello"), 2, "--no-chat has no template")


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    long = "word " * 200
    result = strata("run", MODEL, "-p", long, "--no-chat", "--max-context", "64")
    assert_clear(result, 2, "--max-context")


def test_report_writes_a_text_and_an_archive(tmp_path: Path) -> None:
    result = strata("report", MODEL, "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    (markdown,) = (tmp_path / "out").glob("*.md")
    (archive,) = (tmp_path / "out").glob("*.zip")
    assert str(markdown) in result.stdout
    assert str(archive) in result.stdout
    assert 0 < markdown.stat().st_size < 50_000


def test_report_says_by_pseudonym_what_it_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "wendyfields")
    model = tmp_path / "wendyfields" / "m.gguf"
    model.parent.mkdir()
    model.write_bytes(Path(MODEL).read_bytes())
    said = " ".join(strata("report", str(model), "-o", str(tmp_path / "out")).stdout.split())
    assert re.search(r"\[user-\d\] \(\d+ times?\)", said), said  # square brackets are no markup
    assert "(1 times)" not in said


def test_explain_knows_an_error_or_says_that_it_does_not(tmp_path: Path) -> None:
    known = strata("explain", "cannot pin 322 MiB: no CUDA-capable device is detected, nor place it in VRAM")
    assert known.returncode == 0
    assert "STR-CTX-BROKEN" in known.stdout
    log = tmp_path / "engine.log"
    log.write_text("loaded 46.84 GiB\nnative head upload: out of memory\n")
    assert "line 2" in strata("explain", str(log)).stdout
    piped = strata("explain", "-", "--json", stdin=log.read_text())
    assert json.loads(piped.stdout)[0]["line_number"] == 2
    unknown = strata("explain", "the sky is blue")
    assert unknown.returncode == 3
    assert "Not known" in unknown.stdout


def test_doctor_replays_a_recorded_machine_and_explains_its_checks() -> None:
    machine = GOLDEN.parent / "machines" / "seed-000-broken-context.json"
    result = strata("doctor", "--facts", str(machine))
    assert result.returncode == 1
    assert "12.4" in result.stdout
    assert "615.78.05" in result.stdout
    assert "STR-CTX-BROKEN" in strata("doctor", "--list-checks").stdout
    assert "cudaMalloc" in strata("doctor", "--explain", "STR-CTX-BROKEN").stdout
    assert_clear(strata("doctor", "--explain", "STR-NONE"), 2, "STR-NONE")


def test_plan_for_a_machine_that_one_does_not_have() -> None:
    result = strata("plan", MODEL, "--gpu", "RTX 4090", "--ram", "64GiB", "--wsl2")
    assert result.returncode == 0, result.stderr
    assert "RTX 4090" in result.stdout
    assert "WSL2" in result.stdout
    assert_clear(strata("plan", MODEL, "--ram", "64GiB"), 2, "--gpu")
    assert_clear(strata("plan", MODEL, "--gpu", "RTX 9999", "--ram", "64GiB"), 2, "RTX 9999")
    assert_clear(strata("plan", MODEL, "--gpu", "RTX 4090", "--ram", "64GiB", "--wsl2", "--windows"), 2, "--windows")


@pytest.mark.parametrize("command", ["", "run", "plan", "doctor", "report", "explain", "version"])
def test_help_names_values_only_for_options_that_take_one(command: str) -> None:
    result = strata(*command.split(), "--help")
    assert result.returncode == 0
    assert "bool" not in result.stdout
    if command == "run":
        said = " ".join(result.stdout.replace("│", " ").split())
        assert "[default: random, and said]" in said
        assert "4096 or the model's]" in said


def test_a_plan_on_stdout_is_the_one_document(tmp_path: Path) -> None:
    for path in ("-", "/dev/stdout"):
        result = strata("plan", MODEL, "-o", path)
        assert json.loads(result.stdout)["feasible"] is True
    assert not Path("-").exists()


@pytest.mark.parametrize(
    ("words", "context", "said"),
    [
        (200, 64, "--max-context"),
        (20_000, 64, "no --max-context helps"),
    ],
)
def test_a_long_prompt_is_refused_before_loading(words: int, context: int, said: str, tmp_path: Path) -> None:
    result = strata("run", MODEL, "--no-chat", "--max-context", str(context), stdin="word " * words)
    assert_clear(result, 2, "tokens, and the context is 64", said)
    logged = [json.loads(line)["event"] for line in next((tmp_path / "logs").iterdir()).read_text().splitlines()]
    assert "plan" not in logged  # which the engine writes before it allocates anything
    assert "allocation" not in logged


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("option", ["--kv-resident", "--spec", "--mtp", "--vision"])
@pytest.mark.parametrize("value", [(), ("2",)])
def test_what_does_not_exist_yet_is_refused_by_name(command: str, option: str, value: tuple[str, ...]) -> None:
    assert_clear(strata(command, option, *value, MODEL), 2, f"({option})", "yet" if option != "--vision" else "text")
    assert json.loads(strata(command, MODEL, option, *value, "--json").stdout)["error"]["remedy"]


def test_an_architecture_that_cannot_run_is_planned_only_and_said_so() -> None:
    header = str(GOLDEN.parent / "headers" / "gpt-oss.gguf")
    shown = strata("plan", header)
    assert shown.returncode == 0
    assert "Plan only, strata run refuses this model: architecture 'gpt-oss'" in " ".join(shown.stdout.split())
    assert "Plan only" in json.loads(strata("plan", header, "--json").stdout)["notes"][0]
    assert "Plan only" not in strata("plan", MODEL).stdout


def test_a_saved_plan_goes_with_no_other_options(tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    assert strata("plan", MODEL, "--max-context", "128", "-o", saved).returncode == 0
    other = strata("run", MODEL, "--plan", saved, "--max-context", "256", "-p", "Hi", "--no-chat")
    assert_clear(other, 2, "--max-context", "Leave the option out")
    same = strata("run", MODEL, "--plan", saved, "--max-context", "128", "-p", "Hi", "--no-chat", "--max-tokens", "2")
    assert same.returncode == 0, same.stderr


def test_a_plan_is_said_for_another_engine_on_a_line_of_its_own() -> None:
    result = strata("plan", MODEL, "--emit", "llama.cpp", "--kv", "f16")
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"llama-server -m {MODEL} ")
    assert "-ctk f16" in line
    assert "What the flags cannot say" in result.stderr
    document = json.loads(strata("plan", MODEL, "--emit", "llama.cpp", "--kv", "f16", "--json").stdout)
    assert document["command"] == line
    assert document["plan"]["feasible"]
    assert_clear(strata("plan", MODEL, "--emit", "vllm"), 2, "llama.cpp")
    refused = strata("plan", MODEL, "--emit", "llama.cpp", "--ram-budget", "100MiB")
    assert_clear(refused, 1, "--ram-budget")
    assert refused.stdout == ""


@pytest.mark.parametrize("arguments", [["--gpu", "RTX 4090"], ["--wsl2"], ["--windows"], ["--ram", "64GiB"]])
def test_half_a_machine_is_refused_and_not_forgotten(arguments: list[str]) -> None:
    assert_clear(strata("plan", MODEL, *arguments), 2, "--ram 64GiB", '--gpu "RTX 4090"')


def test_explain_says_when_a_log_is_not_there(tmp_path: Path) -> None:
    assert_clear(strata("explain", "no-such.log"), 2, "there is no such file")
    assert_clear(strata("explain", str(tmp_path)), 2, "this is a folder")


def test_a_damaged_demo_model_is_to_be_deleted_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "SmolLM2-135M-Instruct-8-experts.Q4_1.gguf").write_bytes(b"GGUF")
    assert_clear(strata("run", "demo", "-p", "x"), 1, "Delete", "the next run makes it anew")


def test_the_catalogue_is_json_where_that_was_asked_for() -> None:
    checks = json.loads(strata("doctor", "--list-checks", "--json").stdout)
    assert {"STR-PLAN-FIT", "STR-CTX-BROKEN"} <= {check["id"] for check in checks}
    one = json.loads(strata("doctor", "--explain", "STR-PLAN-FIT", "--json").stdout)
    assert one["id"] == "STR-PLAN-FIT"
    assert one["explanation"]


def test_the_log_tells_a_run_that_went_well_from_one_that_failed(tmp_path: Path) -> None:
    def events() -> list[dict[str, object]]:
        newest = max((tmp_path / "logs").iterdir())
        return [json.loads(line) for line in newest.read_text().splitlines()]

    assert strata("run", MODEL, "-p", "Hi", "--no-chat", "--max-tokens", "1").returncode == 0
    assert [event["event"] for event in events()][-1] == "generation"
    assert strata("run", MODEL, "-p", "Hi", "--no-chat", "--ram-budget", "100MiB").returncode == 1
    assert events()[-1]["event"] == "error"
    assert "missing" in str(events()[-1]["message"])
