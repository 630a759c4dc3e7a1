"""Where models come from: a file, the demo model, a hub."""

from collections.abc import Callable
from typing import TypeAlias

# Called with what is being done, bytes done so far, and bytes in all; None where a number is not known.
Progress: TypeAlias = Callable[[str, int | None, int | None], None]
