"""A hub on this machine: lists repositories, serves their files with ranges, and misbehaves as it is told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the server holds and how it misbehaves.

    Attributes
    ----------
    repos : dict
        Files by path of every repository.
    faults : list of str
        How the next answers to requests for a file are spoilt, one each: ``cut`` (ends in the middle), ``503``,
        ``no-range`` (the whole file), ``size`` (claims another size), ``bytes`` (other bytes), ``empty``, ``stall``
        (half, then nothing until `go_on`).
    gated : set of str
        Repositories whose files need a token; the token ``good`` has access.
    listing_status : int
        Of the answer to a request for a listing; 200 is a sound one, 0 is a web page.
    requests : list
        Path and Range of every request.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    listing_status: int = 200
    in_git: bool = False  # whether files are kept by Git itself, not by LFS
    checksum: str | None = None  # listed instead of the right one
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""
    go_on: threading.Event = field(default_factory=threading.Event)

    def file_requests(self) -> list[str | None]:
        """Ranges of the requests for files."""
        return [span for path, span in self.requests if "/resolve/" in path]


def start(hub: Hub) -> ThreadingHTTPServer:
    """Serve `hub` on a free port; the caller shuts the server down."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((path, self.headers.get("Range")))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
                self._list(match[1])
            elif match := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
                self._serve(match[1], match[2])
            else:
                self._refuse(404, "EntryNotFound")

        def _list(self, repo: str) -> None:
            if hub.listing_status == 0:
                self._answer(200, b"<html>Log in to this network</html>", {"Content-Type": "text/html"})
            elif hub.listing_status != 200:
                self._refuse(hub.listing_status)
            elif repo not in hub.repos:
                self._refuse(401, "RepoNotFound")
            else:
                files = [_sibling(hub, path, data) for path, data in hub.repos[repo].items()]
                self._answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode())

        def _serve(self, repo: str, path: str) -> None:
            if repo in hub.gated and self.headers.get("Authorization") != "Bearer good":
                self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
                return
            data = hub.repos[repo][path]
            fault = hub.faults.pop(0) if hub.faults else ""
            if fault == "503":
                self._refuse(503)
                return
            if fault == "bytes":
                data = bytes(byte ^ 255 for byte in data)
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if match and fault != "no-range":
                begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
                size = len(data) + (fault == "size")
                extra = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
                self._answer(206, data[begin:end], extra, fault)
            else:
                self._answer(200, data, {}, fault)

        def _answer(self, status: int, body: bytes, extra: dict[str, str] | None = None, fault: str = "") -> None:
            self.send_response(status)
            if fault == "empty":
                body = b""
            self.send_header("Content-Length", str(len(body)))
            for key, value in (extra or {}).items():
                self.send_header(key, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # whoever asked may have been ended by the test
                self.wfile.write(body[: len(body) // 2] if fault in ("cut", "stall") else body)
            if fault == "stall":
                hub.go_on.wait(60)
            if fault in ("cut", "stall"):
                self.close_connection = True

        def _refuse(self, status: int, code: str = "") -> None:
            self._answer(status, b"no", {"X-Error-Code": code} if code else {})

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def _sibling(hub: Hub, path: str, data: bytes) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": path, "size": len(data)}
    if hub.in_git:
        return sibling | {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
    checksum = hashlib.sha256(data).hexdigest() if hub.checksum is None else hub.checksum
    return sibling | {"lfs": {"size": len(data), "sha256": checksum, "pointerSize": 130}, "blobId": "0" * 40}
