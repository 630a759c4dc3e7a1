"""Take what identifies a person or a machine out of a text before it is shown to others.

By value: the user's name, home folder and host name are known here and replaced wherever they stand; addresses,
serials, UUIDs and tokens are known by their form. Everything is found in one pass, so no replacement is ever
searched again, and equal values get equal pseudonyms: two GPUs stay two.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import re
import socket
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

# Names that identify nobody, and that every log is full of.
NOBODY = frozenset({"root", "admin", "administrator", "nobody", "localhost", "default", "public", "runner"})
# Words of the field: someone called like one is replaced only where it stands as a name (/home/cuda, USER=cuda).
WORDS = frozenset(
    re.findall(
        r"\w+",
        """cuda gpu cpu ram vram nvidia driver linux windows ubuntu debian fedora arch wsl docker python cupy numpy
        model models strata expert experts token tokens cache kernel memory disk head plan run test max min free used
        total home host local data work dev lib usr bin etc opt var tmp mnt user users system the and for not are was
        has one all""",
    )
)
EDGE = r"\w\u0300-\u036f"  # what a word is made of: letters, digits, underscore, combining accents
VERSION_BEFORE = re.compile(  # the word itself, then nothing but what stands between a name and its version
    r"(?:nvidia|cuda|cupy|cublas|cudnn|nccl|nvrtc|version|driver|kernel|release|build|linux|windows|package|==|\bv)"
    r"[\w\-.]{0,24}[\"': =(]{0,4}$",
    re.IGNORECASE,
)
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours, which would hide a word's edge
_BEGINS = rf"(?:(?<![{EDGE}])|(?<=%[0-9A-Fa-f]{{2}})|(?<=\\[nrt]))"  # a word's edge, in an encoded text too
SECRET_KEY = re.compile(r"token$|secret|passw|api_?key|access_?key|credential|serial|machine.?id", re.IGNORECASE)
ASSIGNED = r"\\?[\"']?[ \t]*[=:][ \t]*\\?[\"']?"  # what stands between a key and its value in JSON, env or prose
NAME_IN_PATH = r"[^/\\\s\"'<>|:;,)\]]+"

FORMS = {  # kind -> pattern; what its group "keep_..." matched stays in the text
    "token": r"(?<![\w-])(?:hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}"
    r"|glpat-[\w-]{8,}|nvapi-[\w-]{8,}|gsk_\w{8,}|r8_\w{8,}|npm_\w{8,}|pypi-[\w-]{16,}|AIza[\w-]{20,}"
    r"|[sr]k_(?:live|test)_\w{8,}|sk-[A-Za-z0-9_-]{12,}|xox[a-z]-[A-Za-z0-9-]{8,}|AKIA[0-9A-Z]{12,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)",
    "bearer": rf"(?<!\w)(?P<keep_bearer>(?i:bearer[ \t]+|authorization{ASSIGNED}(?:basic|token)[ \t]+))"
    r"(?:(?=\S*\d)[A-Za-z0-9._~+/=-]{6,}|[A-Za-z0-9._~+/=-]{20,})",
    "login": r"(?P<keep_login>://)[^\s/@\"'<>]+(?=@)",
    "secret": rf"(?P<keep_secret>(?:TOKEN|SECRET|API_?KEY|ACCESS_?KEY|(?i:passw(?:or)?d|api[_-]key|secret)){ASSIGNED})"
    r"[^\s\"'\\,;]{4,}"
    r"|(?P<keep_query>[?&](?i:[\w-]*token|sig(?:nature)?|key|policy|credential|x-amz-[\w-]+|key-pair-id)=)[^\s&\"'<>]+"
    r"|(?P<keep_option>(?<!\S)--?(?:[\w-]+-)?(?:token|password)[ =])[^\s\"']{4,}",
    "serial": rf"(?<!\w)(?P<keep_serial>(?i:serial(?:[ _-]?(?:number|no))?|s/n|machine-id){ASSIGNED})"
    r"[A-Za-z0-9][\w-]{3,}|(?P<keep_disk>/disk/by-[a-z]+/)[^\s\"',;)]+",
    "email": r"(?<![\w.+-])[\w.+-]{1,64}(?:@|%40)(?:[A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,24}(?![\w-])",
    "server": r"(?:(?<=^)|(?<=[\s\"'=(]))(?P<keep_share>\\{2,4}|//)(?![.?])[\w.-]+(?=[/\\])"
    r"|(?<![\w/:.\\-])(?!\w+:/{2})[A-Za-z][\w.-]+(?=:/[\w.-])",  # \\server\share, //server/share, server:/share
    "elsewhere": r"(?P<keep_elsewhere>(?:[/\\]{1,2}(?:home|[Uu]sers)|(?<![\w.])/(?:run/)?media)[/\\]{1,2})"
    rf"(?:{NAME_IN_PATH}(?: {NAME_IN_PATH}){{0,3}}(?=[/\\])|{NAME_IN_PATH})",
    "uuid": r"(?<![0-9A-Za-z])(?P<keep_uuid>(?:GPU|MIG)-)?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"(?![0-9A-Za-z])|(?<![0-9A-Za-z])(?P<keep_part>(?:GPU|MIG)-)[0-9a-fA-F]{6,}[0-9a-fA-F-]*"
    r"|(?<!\w)(?P<keep_sid>S-1-5-21-)\d+(?:-\d+){2,}",
    "mac": r"(?<![\w:.-])(?:[0-9A-Fa-f]{2}[:-]){5,19}[0-9A-Fa-f]{2}(?![\w:-])",
    "ip": r"(?<![\w.+-])(?:\d{1,3}\.){3}\d{1,3}(?![\w+-]|\.\d)"
    r"|(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{1,38}(?:%\w+)?(?![\w:])",
}
NAMED_USER = (
    rf"(?:(?<=[Uu]ser[ =:])|(?<=USER=)|(?<=USERNAME=)|(?<=LOGNAME=))<NAME>(?![{EDGE}])|(?<![{EDGE}])<NAME>(?=@)"
)
NAMED_HOST = rf"(?:(?<=@)|(?<=HOSTNAME=)|(?<=COMPUTERNAME=))<NAME>(?![{EDGE}])"


@dataclass(frozen=True)
class Identity:
    """The values to look for."""

    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass
class Replaced:
    """One value that was replaced, by its pseudonym only."""

    kind: str
    pseudonym: str
    times: int = 0


def this_identity() -> Identity:
    """Return the identity of whoever runs this, from the system and the environment."""
    users = {os.environ.get(name, "") for name in ("USER", "USERNAME", "LOGNAME", "SUDO_USER")}
    homes = {os.environ.get(name, "") for name in ("HOME", "USERPROFILE")}
    # A user id without an account, as in some containers, has neither name nor home.
    with contextlib.suppress(OSError, KeyError, ImportError):
        users.add(getpass.getuser())
    with contextlib.suppress(OSError, RuntimeError):
        homes.add(str(Path.home()))
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        account = pwd.getpwuid(os.getuid())
        users |= {account.pw_name, account.pw_gecos.partition(",")[0]}
        homes.add(account.pw_dir)
    hosts = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    hosts |= {os.environ.get(name, "") for name in ("HOSTNAME", "COMPUTERNAME", "USERDOMAIN", "USERDNSDOMAIN")}
    homes |= {os.path.realpath(home) for home in homes if _is_home(home)}
    return Identity(_longest_first(users), _longest_first(homes), _longest_first(hosts))


@dataclass
class Redactor:
    """Replaces what identifies, with the same pseudonym for the same value in every text it is given."""

    identity: Identity = field(default_factory=this_identity)
    _names: dict[tuple[str, str], Replaced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pattern = re.compile("|".join(f"(?P<{kind}>{form})" for kind, form in self._forms().items() if form))

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """What was replaced so far."""
        return tuple(self._names.values())

    def text(self, text: str) -> str:
        """Return `text` with everything that identifies replaced."""
        return self._pattern.sub(self._replace, ANSI.sub("", text))

    def value(self, value: Any, key: str = "") -> Any:
        """Return `value` (JSON-like, msgspec structs welcome) with every string in it redacted.

        What stands under a secret's key is replaced altogether; enumerations and the names of fields stay.
        """
        if type(value) is str:
            return self._pseudonym("secret", value) if value and SECRET_KEY.search(key) else self.text(value)
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.replace(
                value, **{name: self.value(getattr(value, name), name) for name in value.__struct_fields__}
            )
        if isinstance(value, dict):
            return {self.value(k): self.value(v, str(k)) for k, v in value.items()}
        return type(value)(self.value(v, key) for v in value) if isinstance(value, (list, tuple)) else value

    def _forms(self) -> dict[str, str]:
        """Return every pattern by its kind, in the order in which they are tried at one place."""
        who = self.identity
        return {
            **{kind: FORMS[kind] for kind in ("token", "bearer", "login", "secret", "serial", "email")},
            "home": _alternatives(who.homes, _is_home, rf"(?<![{EDGE}/\\])<NAME>(?![{EDGE}.-])"),
            "elsewhere": FORMS["elsewhere"],
            "host": _alternatives(who.hosts, _is_distinctive, rf"{_BEGINS}(?<![.-])<NAME>(?![{EDGE}])"),
            "user": _alternatives(who.users, _is_distinctive, rf"{_BEGINS}<NAME>(?![{EDGE}])"),
            "server": FORMS["server"],
            "named_user": _alternatives(who.users, _is_common, NAMED_USER),
            "named_host": _alternatives(who.hosts, _is_common, NAMED_HOST),
            **{kind: FORMS[kind] for kind in ("uuid", "mac", "ip")},
        }

    def _replace(self, match: re.Match[str]) -> str:
        kind = match.lastgroup or ""
        kept = next((text for name, text in match.groupdict().items() if name.startswith("keep") and text), "")
        value = match[0][len(kept) :]
        before = match.string[max(match.start() - 48, 0) : match.start()]
        if (kind == "ip" and not _is_address(value, before)) or (kind == "elsewhere" and value.lower() in NOBODY):
            return match[0]
        return kept + self._pseudonym("user" if kind == "elsewhere" else kind.removeprefix("named_"), value)

    def _pseudonym(self, kind: str, value: str) -> str:
        plain = unicodedata.normalize("NFC", value).casefold()
        kind = "token" if kind in ("bearer", "login", "secret") else "host" if kind == "server" else kind
        if (kind, plain) not in self._names:
            number = sum(k == kind for k, _ in self._names) + 1
            name = "~" if kind == "home" else f"[{kind}]" if kind == "token" else f"[{kind}-{number}]"
            self._names[kind, plain] = Replaced(kind, name)
        entry = self._names[kind, plain]
        entry.times += 1
        return entry.pseudonym


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({v for v in values if v}, key=lambda v: (-len(v), v)))


def _alternatives(values: Iterable[str], wanted: Callable[[str], bool], where: str) -> str:
    """Return a pattern for `values` in every spelling, each standing as <NAME> stands in `where`; "" for none."""
    spelled = [_spellings(value) for value in _longest_first(values) if wanted(value)]
    return where.replace("<NAME>", f"(?i:{'|'.join(spelled)})") if spelled else ""


def _spellings(value: str) -> str:
    """Return a pattern for `value` composed or decomposed, percent-encoded, or escaped as in JSON or a C string."""
    forms = {unicodedata.normalize(form, value) for form in ("NFC", "NFD")}
    forms |= (
        {quote(form) for form in forms}
        | {quote(form, safe="") for form in forms}
        | {json.dumps(form)[1:-1] for form in forms}
    )
    forms |= {form.replace("\\", "/") for form in forms} | {form.replace("\\", "\\\\") for form in forms}
    return "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))


def _is_home(path: str) -> bool:
    return len(path) > 1 and path not in ("/root", "/nonexistent", "/var/empty")


def _is_common(name: str) -> bool:
    plain = name.casefold()
    return plain not in NOBODY and (len(name) < 3 or plain in WORDS or name.isdigit())


def _is_distinctive(name: str) -> bool:
    return name.casefold() not in NOBODY and not _is_common(name)


def _is_address(text: str, before: str) -> bool:
    """Return whether `text` is somebody's network address and not a version or a time; loopback is nobody's."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return False
    return address.version == 6 or not VERSION_BEFORE.search(before)
