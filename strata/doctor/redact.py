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

from strata.doctor.redact_forms import (
    ANSI,
    BEGINS,
    EDGE,
    FORMS,
    HOST_KEY,
    NAMED_HOST,
    NAMED_USER,
    NOBODY,
    SAME_KIND,
    SECRET_KEY,
    SLASH,
    USER_KEY,
    VERSION_BEFORE,
    WORDS,
)


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
    hosts |= _domains(Path("/etc/resolv.conf"))
    homes |= {os.path.realpath(home) for home in homes if _is_home(home)}
    return Identity(_longest_first(users), _longest_first(homes), _longest_first(hosts))


def _domains(resolver: Path) -> set[str]:
    """Return the domains in which this machine looks for names: a company's says whose machine it is."""
    try:
        lines = resolver.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    found = {name.strip(".") for line in lines if line.startswith(("search ", "domain ")) for name in line.split()[1:]}
    return {name for name in found if "." in name}


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
            if value and SECRET_KEY.search(key):
                return self._pseudonym("secret", value)
            return self._labelled(value, key) or self.text(value)
        if isinstance(value, msgspec.Struct):
            return msgspec.structs.replace(
                value, **{name: self.value(getattr(value, name), name) for name in value.__struct_fields__}
            )
        if isinstance(value, dict):
            return {self.value(k): self.value(v, str(k)) for k, v in value.items()}
        return type(value)(self.value(v, key) for v in value) if isinstance(value, (list, tuple)) else value

    def _labelled(self, value: str, key: str) -> str | None:
        """Return the pseudonym of a name that is a common word but stands under its key; None for what is not one."""
        for kind, keys, names in (("user", USER_KEY, self.identity.users), ("host", HOST_KEY, self.identity.hosts)):
            if keys.fullmatch(key) and value.casefold() in map(str.casefold, names) and _is_common(value):
                return self._pseudonym(kind, value)
        return None

    def _forms(self) -> dict[str, str]:
        """Return every pattern by its kind, in the order in which they are tried at one place."""
        who = self.identity
        return {
            **{kind: FORMS[kind] for kind in ("token", "private_key", "bearer", "login", "secret", "serial", "email")},
            "home": _alternatives(who.homes, _is_home, rf"(?<![{EDGE}/\\])<NAME>(?![{EDGE}.-])"),
            "elsewhere": FORMS["elsewhere"],
            "host": _alternatives(who.hosts, _is_distinctive, rf"{BEGINS}(?<![.-])<NAME>(?![{EDGE}])"),
            "domain": _alternatives(who.hosts, lambda name: "." in name, rf"(?<=\.)<NAME>(?![{EDGE}])"),
            "user": _alternatives(who.users, _is_distinctive, rf"{BEGINS}<NAME>(?![{EDGE}])"),
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
        kind = SAME_KIND.get(kind, kind)
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
        | {re.sub(r"([ '\"()&;$])", r"\\\1", form) for form in forms}  # as a shell wants it
    )
    return "|".join(_any_slashes(form) for form in sorted(forms, key=len, reverse=True))


def _any_slashes(text: str) -> str:
    """Return a pattern for `text` with each run of slashes either way and escaped however often."""
    return SLASH.join(re.escape(part) for part in re.split(r"[/\\]+", text))


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
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_unspecified:
        return False
    return address.version == 6 or not VERSION_BEFORE.search(before)
