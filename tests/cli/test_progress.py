"""What a bar says beside itself."""

import pytest

from strata.cli.progress import amount

MIB = 1 << 20


@pytest.mark.parametrize(
    ("done", "total", "speed", "unit", "said"),
    [
        (0, 74 * MIB, None, "bytes", "0 B of 74 MiB"),
        (11 * MIB, 74 * MIB, 228.5 * MIB, "bytes", "11 MiB of 74 MiB, 228.5 MiB/s"),
        (1024 * MIB, 18432 * MIB, 2048 * MIB, "bytes", "1 GiB of 18 GiB, 2 GiB/s"),
        (0, 37, None, "tokens", "0 of 37 tokens"),
        (1024, 4096, 563.2, "tokens", "1,024 of 4,096 tokens, 563/s"),
    ],
)
def test_amounts(done: float, total: float, speed: float | None, unit: str, said: str) -> None:
    assert amount(done, total, speed, unit) == said
