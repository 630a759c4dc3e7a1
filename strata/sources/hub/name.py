"""The names ``hf:owner/repo`` and ``hf:owner/repo/file``, and the files that belong to one model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strata.errors import UsageError

PREFIX = "hf:"
_NAME = re.compile(r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>.+))?", re.ASCII)
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.IGNORECASE)
# What some system reads as more than a name: Windows drops dots at the end, and has devices called aux or nul.
_FORBIDDEN = re.compile(
    r'[\x00-\x1f\\:*?"<>|]|[. ](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.[^/]*)?(/|$)', re.IGNORECASE
)


@dataclass(frozen=True)
class HubName:
    """What a person typed: a repository ``owner/repo``, and perhaps one of its files."""

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f"/{self.file}" if self.file else "")


def parse_name(text: str) -> HubName:
    """Read ``hf:owner/repo[/file]``.

    Raises
    ------
    UsageError
        It is not written like that.
    """
    match = _NAME.fullmatch(text.rstrip("/"))
    if match is None:
        raise UsageError(
            f"open model {text}", "a model of the hub is named by its owner and repository", "Write hf:owner/repo"
        )
    if match["file"] and not is_plain(match["file"]):
        raise UsageError(
            f"open model {text}", f"{match['file']!r} is no file of a repository", "Write hf:owner/repo/file"
        )
    return HubName(match["repo"], match["file"])


def is_plain(file: str) -> bool:
    """Whether a file's path, as a hub gives it, stays inside the folder that it is put into, on every system."""
    return not _FORBIDDEN.search(file) and all(file.split("/"))


def shard_names(file: str) -> tuple[str, ...]:
    """Name all files of the set that `file` belongs to, in order; just `file` when it is no part of a set."""
    match = _SHARD.fullmatch(file)
    if match is None or not 1 < int(match["count"]) <= 4096:
        return (file,)
    ending = file[-len(".gguf") :]
    return tuple(
        f"{match['stem']}-{number:05}-of-{match['count']}{ending}" for number in range(1, int(match["count"]) + 1)
    )
