"""`strata report` and `strata explain`: what to send when something went wrong, and what an error text means."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, out, say, stop
from strata.cli.preflight import make_or_load_plan, open_model, take_facts, with_last_run
from strata.errors import ExitCode, Undetermined, UsageError

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions

LARGEST_TEXT = 64 << 20  # bytes of a log that are read


def write_report(model: str | None, options: PlanOptions, folder: Path, *, json: bool) -> None:
    """Gather everything a person needs to help, redacted, into `folder`."""
    from strata.doctor.bundle import write_bundle
    from strata.doctor.diagnose import diagnose
    from strata.doctor.raw_outputs import raw_outputs
    from strata.runtime.runlog import log_folder, run_logs

    opened = open_model(model, header_only=True) if model else None
    facts = with_last_run(take_facts(opened.file.path if opened else None, options))
    plan = None
    if opened:
        try:
            plan, _ = make_or_load_plan(opened.facts, facts, options)
        except Undetermined as error:
            say(f"No plan: {error}")
    report = diagnose(facts, model=opened.facts if opened else None, plan=plan, options=options)
    bundle = write_bundle(report, folder, logs=run_logs(log_folder()), raw=raw_outputs())
    if json:
        emit_json({"markdown": str(bundle.markdown), "archive": str(bundle.archive), "replaced": len(bundle.replaced)})
        return
    out().print(report.verdict.sentence, markup=False)
    out().print(f"\nFor an issue, paste  {bundle.markdown}\nand attach           {bundle.archive}", soft_wrap=True)
    kinds = ", ".join(f"{each.pseudonym} ({each.times} times)" for each in bundle.replaced)
    out().print(f"Replaced: {kinds or 'nothing'}. Look through both before you send them.", soft_wrap=True)


def explain_text(text: str, *, json: bool) -> None:
    """Say what is known of an error: `text` itself, or the file or stdin ('-') that it names."""
    from strata.doctor.explain import explain

    found = explain(_read(text))
    if json:
        emit_json(found)
    else:
        from strata.doctor.explain_view import explanations_view

        out().print(explanations_view(found))
    stop(ExitCode.OK if found else ExitCode.UNDETERMINED)


_LOG_SUFFIXES = (".log", ".txt", ".json", ".jsonl", ".out", ".err")


def _refuse_path(path: Path, text: str) -> None:
    """Say that a file is missing where nothing else can be meant: a folder, or one word that ends as logs do."""
    if path.is_dir():
        raise UsageError(f"read {text}", "this is a folder", "Give the path of a log file")
    if path.suffix in _LOG_SUFFIXES and not text.split()[1:]:
        raise UsageError(f"read {text}", "there is no such file", "Give the path of a log file, or an error text")


def _read(text: str) -> str:
    if text == "-":
        return sys.stdin.buffer.read(LARGEST_TEXT).decode(errors="replace")
    if not {os.sep, os.altsep} & set(text) and not Path(text).suffix:
        return text
    try:
        path = Path(text)
        if not path.is_file():
            _refuse_path(path, text)
            return text
        with path.open("rb") as file:
            return file.read(LARGEST_TEXT).decode(errors="replace")
    except (OSError, ValueError) as error:  # a path that no system can have is a text
        if isinstance(error, PermissionError):
            raise UsageError(f"read {text}", "the system refuses: permission denied", "Check the permissions") from None
        return text
