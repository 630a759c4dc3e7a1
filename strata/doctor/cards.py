"""Published figures of NVIDIA cards: for machines that one does not have, and for speeds that were not measured."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from strata.doctor.units import MIB
from strata.errors import UsageError


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet.

    Attributes
    ----------
    name : str
    vram_bytes : int
        As nvidia-smi reports it.
    bandwidth : float
        Of VRAM, bytes per second.
    link : float
        What a copy from page-locked memory reaches on the card's full link, bytes per second: about 85 % of
        PCI Express's raw rate.
    link_name : str
    tensor_tflops : float
        Dense f16 products with f32 sums, 1e12 operations per second.
    fp32_tflops : float
        The same for f32 outside the tensor cores, a product and a sum counting as two.
    """

    name: str
    vram_bytes: int
    bandwidth: float
    link: float
    link_name: str
    tensor_tflops: float
    fp32_tflops: float


_LINKS = {"PCIe 4 x16": 26e9, "PCIe 4 x8": 13e9, "PCIe 5 x16": 53e9, "PCIe 5 x8": 26e9}


def _card(name: str, mib: int, gb_per_s: float, link: str, tensor: float, fp32: float) -> Card:
    return Card(name, mib * MIB, gb_per_s * 1e9, _LINKS[link], link, tensor, fp32)


# Name, MiB of VRAM, GB/s, link, f16 TFLOP/s on tensor cores, f32 TFLOP/s: from NVIDIA's data sheets and papers.
CARDS = (
    _card("RTX 3060 12GB", 12_288, 360, "PCIe 4 x16", 26, 12.7),
    _card("RTX 3080 10GB", 10_240, 760, "PCIe 4 x16", 60, 29.8),
    _card("RTX 3090", 24_576, 936, "PCIe 4 x16", 71, 35.6),
    _card("RTX 4060 8GB", 8_188, 272, "PCIe 4 x8", 30, 15.1),
    _card("RTX 4060 Ti 16GB", 16_380, 288, "PCIe 4 x8", 44, 22.1),
    _card("RTX 4070", 12_282, 504, "PCIe 4 x16", 58, 29.1),
    _card("RTX 4080", 16_376, 717, "PCIe 4 x16", 97, 48.7),
    _card("RTX 4090", 24_564, 1_008, "PCIe 4 x16", 165, 82.6),
    _card("RTX 5060 Ti 16GB", 16_311, 448, "PCIe 5 x8", 47, 23.7),
    _card("RTX 5070", 12_227, 672, "PCIe 5 x16", 62, 30.9),
    _card("RTX 5070 Ti", 16_303, 896, "PCIe 5 x16", 88, 43.9),
    _card("RTX 5080", 16_303, 960, "PCIe 5 x16", 113, 56.3),
    _card("RTX 5090", 32_607, 1_792, "PCIe 5 x16", 210, 104.8),
    _card("RTX PRO 6000", 97_887, 1_792, "PCIe 5 x16", 250, 126),
    _card("A100 80GB", 81_920, 1_935, "PCIe 4 x16", 312, 19.5),
    _card("H100 80GB", 81_559, 3_350, "PCIe 5 x16", 990, 67),
    _card("H200", 143_771, 4_800, "PCIe 5 x16", 990, 67),
)


def find_card(name: str) -> Card:
    """Return the card that a person names: the maker's words, spaces and, if left out, the size do not matter.

    Raises
    ------
    UsageError
        The table has no such card.
    """
    base, gb = _split(name)
    for card in CARDS:
        known, known_gb = _split(card.name)
        if base == known and gb in (None, known_gb):
            return card
    names = [card.name for card in CARDS]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or names
    raise UsageError(
        f"plan for a machine with {name!r}", "the table of cards does not have it", f"Use one of: {', '.join(near)}"
    )


def known_card(name: str) -> Card | None:
    """Return the table's card for a name as the driver reports it, whatever its size, if there is one."""
    base, _ = _split(name)
    return next((card for card in CARDS if _split(card.name)[0] == base), None)


_SIZE = re.compile(r"\b(\d+) ?gb\b")
_NOISE = re.compile(r"nvidia|geforce|[\s-]|sxm\d|pcie|hbm\d?e?|nvl|blackwell.*edition")


@functools.cache
def _split(name: str) -> tuple[str, str | None]:
    """Return a name without what does not tell cards apart, and its memory in GB where it says so."""
    lower = name.lower()
    said = _SIZE.search(lower)
    return _NOISE.sub("", _SIZE.sub("", lower)), said and said[1]
