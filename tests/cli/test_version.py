"""`strata version`."""

import json
import platform

import numpy

from strata import __version__
from tests.cli.runner import strata


def test_short_and_verbose() -> None:
    assert strata("version").stdout == f"strata {__version__}\n"
    assert json.loads(strata("version", "--json").stdout) == {"strata": __version__}
    shown = strata("version", "--verbose").stdout.splitlines()
    assert shown[0].split() == ["strata", __version__]
    found = json.loads(strata("version", "-v", "--json").stdout)
    assert found["numpy"] == numpy.__version__
    assert found["python"].startswith(platform.python_version())
    assert found["system"] == platform.platform()
    assert {"cupy", "driver"} <= found.keys()
