"""`strata report` and `strata explain`: what to send when something went wrong, and what an error text means."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strata.cli.output import emit_json, out, say, stop
from strata.cli.preflight import open_model, plan_or_why_not, take_facts, with_last_run
from strata.errors import ExitCode

if TYPE_CHECKING:
    from strata.doctor.plan import PlanOptions


def write_report(model: str | None, options: PlanOptions, folder: Path, *, json: bool) -> None:
    """Gather everything a person needs to help, redacted, into `folder`."""
    from rich.text import Text

    from strata.doctor.bundle import write_bundle
    from strata.doctor.diagnose import diagnose
    from strata.doctor.raw_outputs import raw_outputs
    from strata.doctor.report import Trimmed
    from strata.doctor.units import counted
    from strata.runtime.runlog import log_folder, run_logs

    opened = open_model(model, header_only=True) if model else None
    facts = with_last_run(take_facts(opened.file.path if opened else None, options))
    plan, no_plan = plan_or_why_not(opened, facts, options)
    report = diagnose(facts, model=opened.facts if opened else None, plan=plan, options=options, no_plan=no_plan)
    bundle = write_bundle(report, folder, logs=run_logs(log_folder()), raw=raw_outputs())
    if json:
        emit_json({"markdown": str(bundle.markdown), "archive": str(bundle.archive), "replaced": len(bundle.replaced)})
        return
    out().print(Trimmed(Text(report.verdict.sentence)))
    out().print(
        Text(f"\nFor an issue, paste  {bundle.markdown}\nand attach           {bundle.archive}"), soft_wrap=True
    )
    kinds = ", ".join(f"{each.pseudonym} ({counted(each.times, 'time')})" for each in bundle.replaced)
    replaced = Text(f"Replaced: {kinds or 'nothing'}. Look through both before you send them.")  # [..] is no markup
    out().print(replaced, soft_wrap=True)


def explain_text(given: str, *, json: bool) -> None:
    """Say what is known of an error: `given` itself, or the file or stdin ('-') that it names."""
    import msgspec

    from strata.cli.error_text import MOST, read_error_text
    from strata.doctor.explain import explain

    text = read_error_text(given)
    if text.skipped:
        say(f"Only the first and the last {MOST >> 21} MiB of it are looked at.")
    found = tuple(
        msgspec.structs.replace(each, line_number=text.line_number(each.line_number)) for each in explain(text.text)
    )
    if json:
        emit_json(found)
    else:
        from strata.doctor.explain_view import explanations_view

        out().print(explanations_view(found))
    stop(ExitCode.OK if found else ExitCode.UNDETERMINED)
