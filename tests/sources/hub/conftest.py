"""A hub on this machine instead of the real one; no token, no cache of other tools, no pauses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from strata.sources.hub import download, headers
from tests.sources.hub.server import Hub, start


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    held = Hub()
    server = start(held)
    monkeypatch.setattr(constants, "ENDPOINT", held.url)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", held.url + template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "shared"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download, "_PAUSES_S", (0, 0))
    monkeypatch.setattr(headers, "_PAUSES_S", (0, 0))
    yield held
    server.shutdown()
    server.server_close()
