"""The demo model, kept where a person's own is, so that it is fetched once."""

import os

import pytest

from strata.errors import DemoUnavailable
from strata.gguf.reader import GGUFFile, open_gguf
from strata.sources.demo import demo_model


def open_demo() -> GGUFFile:
    """Open the demo model; where it cannot be fetched, skip, but never in CI."""
    try:
        return open_gguf(demo_model(lambda what, done, total: None))
    except DemoUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
