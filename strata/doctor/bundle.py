"""The report as files: a Markdown text for an issue, and a .zip with all that it rests on, both redacted."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from strata.doctor.files import write_files
from strata.doctor.findings import Report
from strata.doctor.markdown import cut, to_markdown
from strata.doctor.redact import Redactor, Replaced
from strata.doctor.versions import versions
from strata.errors import UsageError

SECTION = 16 << 10  # bytes of one raw output, or of one log
LOOKED_AT = 8 * SECTION  # bytes of each that are redacted, which takes seconds a megabyte, before it is cut to that
LOGS = 10


@dataclass(frozen=True)
class Bundle:
    """What was written, and what was replaced in it: the person should look before sending."""

    markdown: Path
    archive: Path
    replaced: tuple[Replaced, ...]


def write_bundle(
    report: Report,
    folder: Path,
    *,
    logs: Sequence[Path] = (),
    raw: Mapping[str, str] | None = None,
    redactor: Redactor | None = None,
) -> Bundle:
    """Write strata-report-TIME.md and .zip into `folder`, whole or not at all.

    Parameters
    ----------
    report : Report
        As `diagnose` made it, not redacted.
    folder : Path
        Made when missing.
    logs : sequence of Path
        Run logs, newest first; the first ten are taken.
    raw : mapping, optional
        Outputs of the system's tools by their name (see `raw_outputs`).
    redactor : Redactor, optional
        One that knows who runs this, by default.

    Raises
    ------
    StrataError
        When a file cannot be written.
    """
    redactor = redactor or Redactor()
    safe: Report = redactor.value(report)
    markdown = to_markdown(safe)
    files = {
        "report.md": markdown,
        "facts.json": _json(safe.facts),
        "findings.json": _json(safe.findings),
        "plan.json": _json(safe.plan) if safe.plan else None,
        "versions.json": _json(redactor.value(versions())),
        **{
            f"raw/{_file_name(redactor.text(name))}.txt": cut(redactor.text(cut(text, LOOKED_AT)), SECTION)
            for name, text in (raw or {}).items()
        },
        **{f"logs/{redactor.text(log.name)}": cut(_log(log, redactor), SECTION) for log in logs[:LOGS]},
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in files.items():
            if text is not None:
                out.writestr(name, text.encode("utf-8", "replace"))
    stem = f"strata-report-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    bundle = Bundle(folder / f"{stem}.md", folder / f"{stem}.zip", redactor.replaced)
    _write({bundle.markdown: markdown.encode("utf-8", "replace"), bundle.archive: archive.getvalue()})
    return bundle


def _log(path: Path, redactor: Redactor) -> str:
    """Return a log redacted: event by event where it is JSON, as text where it is not."""
    try:
        with path.open("rb") as file:
            data = file.read(LOOKED_AT)
            if file.seek(0, os.SEEK_END) > LOOKED_AT:
                file.seek(max(file.tell() - LOOKED_AT, LOOKED_AT))  # how it ended
                data += file.read(LOOKED_AT)
            text = data.decode("utf-8", "replace")
    except OSError as failure:
        return f"could not be read: {failure.strerror or failure}"
    return "\n".join(_redacted(cut(text, LOOKED_AT).splitlines(), redactor))


def _redacted(lines: Sequence[str], redactor: Redactor) -> Iterator[str]:
    """Yield events by themselves, and what is text together: a token may be wrapped over two lines."""
    plain: list[str] = []
    for line in lines:
        try:
            event = msgspec.json.encode(redactor.value(msgspec.json.decode(line))).decode()
        except (msgspec.DecodeError, RecursionError):
            plain.append(line)
            continue
        if plain:
            yield redactor.text("\n".join(plain))
            plain = []
        yield event
    if plain:
        yield redactor.text("\n".join(plain))


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _write(files: Mapping[Path, bytes]) -> None:
    folder = next(iter(files)).parent
    asked, remedy = f"write a report to {folder}", "Choose another folder: strata report -o DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(asked, error.strerror or str(error), remedy) from None
    write_files(files, asked, remedy)
