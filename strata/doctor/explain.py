"""What an error text means: each line that is recognised, its cause and its remedy; nothing for what is not known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import msgspec

from strata.doctor.cuda_causes import CUDA_CODES
from strata.doctor.known_errors import KNOWN_ERRORS, TROUBLE
from strata.doctor.redact_forms import ANSI

LONGEST_LINE = 1000  # what is looked at of one line; error texts are shorter
MOST_PARTS = 4  # of one wrapped line
MOST_LINES = 4_000  # different lines of trouble that are looked at; of more, the first and the last ones
CLOCK = re.compile(r"^[\[(]*\d[\dT:.,/ Z+-]{6,}\W*")  # a time stamp, which makes equal lines differ
CODE = re.compile(
    r"(?:cuda\w*|\bcu[A-Z]\w*|\bnvrtc)[^\n]{0,80}?(?<!\d )\b(?:error|code|status|returned|failed|rc|err)\b"
    r"(?: with)?(?: error| code)?[ :=(#]*(\d{1,3})\b(?! (?:passed|skipped|tests?)\b)"
    r"|(?:cudaError_?t?|CUresult)[ :=(]+(\d{1,3})\b",
    re.IGNORECASE,
)
DISTINCTIVE = 24  # signs of a CUDA error's string that nobody else says
CUDA_SAYS = re.compile(r"(?<![\w/.\\-])cuda\w*(?![\w/\\-])", re.IGNORECASE)  # not the name of a folder
NOT_KNOWN = "Not known: Strata recognises no line of this text. strata report gathers what a person needs to help."
EVENT = '{"event":'  # how a line of a run log begins
Known = tuple[str, str, str, str | None]  # title, cause, remedy, check


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One recognised error."""

    title: str
    cause: str
    remedy: str
    check: str | None  # id of the check that looks for the same cause: strata doctor --explain ID
    line: str  # the first line it was recognised in
    line_number: int  # from 1
    times: int  # how many lines say the same
    or_more: bool = False  # there were too many different lines to look at them all


def explain(text: str) -> tuple[Explanation, ...]:
    """Return what is known of the errors in `text`, a line or a whole log, in order of first appearance.

    The time is bounded: linear in the text's length for what reports no error, and at most `MOST_LINES` lines that do
    are looked at. An empty result means that nothing is known: see `NOT_KNOWN`.
    """
    seen: dict[str, list[int]] = {}
    for number, line in _logical_lines(ANSI.sub("", text) if "\x1b" in text else text):
        lower = line.lower()
        if any(word in lower for word in TROUBLE) and _is_text(line):
            seen.setdefault(CLOCK.sub("", line), []).append(number)
    lines = list(seen.items())
    too_many = len(lines) > MOST_LINES
    if too_many:
        lines = lines[: MOST_LINES // 2] + lines[-MOST_LINES // 2 :]
    found: dict[Known, tuple[str, list[int]]] = {}
    for line, numbers in lines:
        for known in dict.fromkeys(filter(None, map(_recognise, line.split(";")))) or filter(None, [_recognise(line)]):
            found.setdefault(known, (line, []))[1].extend(numbers)
    return tuple(
        Explanation(
            title=title,
            cause=cause,
            remedy=remedy,
            check=check,
            line=" ".join(line.split()),
            line_number=numbers[0],
            times=len(numbers),
            or_more=too_many,
        )
        for (title, cause, remedy, check), (line, numbers) in found.items()
    )


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line), an indented continuation joined to the line it continues."""
    start, parts = 0, [""]
    for number, raw in _lines(text):
        line = _event_in_words(raw) if raw.startswith(EVENT) else raw
        if line[:1] in (" ", "\t") and parts[0]:
            if len(parts) < MOST_PARTS:
                parts.append(line.strip()[:LONGEST_LINE])
        elif line:
            yield start, " ".join(parts)
            start, parts = number, [line[:LONGEST_LINE]]
    yield start, " ".join(parts)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) as an editor counts them; what a progress bar wrote over is a line of the same number."""
    for number, line in enumerate(text.split("\n"), 1):
        if "\r" in line:
            yield from ((number, part) for part in line.split("\r"))
        else:
            yield number, line


def _is_text(line: str) -> bool:
    """Say whether a line is not a piece of a binary file, in which any short word turns up."""
    begin = line[:200]
    strange = sum(sign == "\ufffd" or (sign < " " and sign != "\t") for sign in begin)
    return strange * 8 <= len(begin)


def _event_in_words(line: str) -> str:
    """Return what an event of Strata's own run log says of a failure: a plan's many words are none."""
    try:
        event = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):  # cut off, or none of ours
        return line
    said: list[str] = []
    for text in (str(event[key]) for key in ("line", "message", "code", "call") if event.get(key)):
        said += [text] if all(text not in earlier for earlier in said) else []
    return f"{event.get('event')} {': '.join(said)}"


@cache
def _rules() -> tuple[tuple[tuple[re.Pattern[str], ...], Known], ...]:
    return tuple(
        (tuple(re.compile(idea, re.IGNORECASE) for idea in k.ideas), (k.title, k.cause, k.remedy, k.check))
        for k in KNOWN_ERRORS
    )


@cache
def _code_words() -> re.Pattern[str]:
    """Every name and string of a CUDA error; a string counts from three quarters of its length, for cut-off lines.

    A short string may be anybody's words ("operation not supported"): see `_by_code`.
    """
    words = []
    for code, known in CUDA_CODES.items():
        long = known.string if len(known.string) >= DISTINCTIVE else None
        cut = re.escape(long[: len(long) * 3 // 4]) if long else None
        names = [rf"{known.name}\b", rf"{known.driver_name}\b", *([cut] if cut else [])]
        words.append(f"(?P<c{code}>{'|'.join(names)})")
    return re.compile("|".join(words), re.IGNORECASE)


def _recognise(line: str) -> Known | None:
    for ideas, known in _rules():
        if all(idea.search(line) for idea in ideas):
            return known
    return _by_code(line)


def _by_code(line: str) -> Known | None:
    """Recognise a CUDA error by its name, its string, or its number beside a word that says it is CUDA's."""
    if by_word := _code_words().search(line):
        code = int((by_word.lastgroup or "c0")[1:])
    elif by_number := CODE.search(line):
        code = int(by_number[1] or by_number[2])
    else:
        short = line.lower() if CUDA_SAYS.search(line) else ""
        code = next((number for number, known in CUDA_CODES.items() if known.string in short), -1)
    known = CUDA_CODES.get(code)
    return known and (f"CUDA error {code}: {known.string}", known.cause, known.remedy, known.check)
