"""Every kernel compiles for every architecture from Turing to Blackwell, and none spills registers. Needs no GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from strata.errors import KernelError
from strata.kernels import compile
from strata.kernels.compile import Compiled, Kernel, compile_kernels
from strata.kernels.cuda_layout import LAYOUTS, PROMPT_TILE_ROWS, Tile

_EVERY_TILE = ("F32", "Q4_K", "Q6_K")  # of other types only the tile that takes the most registers
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def kernels() -> list[Kernel]:
    """Return each kernel with each block type, in the shape of Qwen3-30B-A3B (rows of 2048 and 768)."""
    found = [
        Kernel("layout", "to_planes"),
        Kernel("project", "gated"),
        Kernel("norm", "norm_rows"),
        Kernel("sample", "sample_token"),
        Kernel("attention", "append<128,true,KvF16>"),
        Kernel("attention", "attend<128,8,true,true,KvF16>"),
        Kernel("attention", "attend<128,1,true,true,KvF16>"),
        Kernel("attention", "attend<16,2,true,true,KvF16>"),
        Kernel("attention", "attend<64,8,false,false,KvF32>"),
        Kernel("attention", "attend<256,4,true,true,KvF16>"),
        Kernel("attention", "append<128,true,KvInt8>"),
        Kernel("attention", "attend<128,8,true,true,KvInt8>"),
        Kernel("attention", "attend<64,8,false,false,KvInt8>"),
        Kernel("attention", "attend<256,4,true,true,KvInt8>"),
        *(Kernel("residency", f"make_ready<{word},true>") for word in ("uint4", "uint2", "u32", "u16")),
        Kernel("residency", "make_ready<uint4,false>"),
        Kernel("route", "route<1,F32,4>"),
        Kernel("route", "route<4,F32,16>"),
        Kernel("route", "choose_rows<4>"),
        *(Kernel("prompt", name) for name in ("split_rows", "sort_experts", "combine")),
        *(
            Kernel("prompt_attention", f"prompt_attend<{size},true,{cell},1>")
            for size in (16, 32, 64, 128, 256)
            for cell in ("KvF16", "KvF32", "KvInt8")
        ),
        Kernel("prompt_attention", "prompt_attend<128,true,KvF16,2>"),
    ]
    mixed = f"{Tile.of('Q4_K', 2048)},{Tile.of('Q6_K', 2048)}"
    found += [Kernel("project", f"project<kNothing,false,{tokens},256,{mixed}>") for tokens in (1, 4)]
    found += [Kernel("project", f"project<kBias,false,{tokens},256,{mixed}>") for tokens in (1, 4)]
    with_share = f"{Tile.of('Q4_K', 2048)},{Tile.of('F32', 2048)}"  # a shared expert's gate and up, and how much of it
    found += [Kernel("project", f"project<kNothing,false,{tokens},512,{with_share}>") for tokens in (1, 4)]
    found.append(Kernel("project", f"project<kNothing,true,1,256,{Tile.of('Q6_K', 2048)}>"))
    found += [Kernel("project", f"project<kResidual,false,4,512,{Tile.of(type_, 2048)}>") for type_ in ("F32", "IQ3_S")]
    for type_ in LAYOUTS:
        row, short = Tile.of(type_, 2048), Tile.of(type_, 768, 3)
        found += [
            Kernel("embed", f"gather_rows<{type_}>"),
            *(
                Kernel("prompt_product", f"prompt_product<{type_},{gated},{rows}>")
                for gated in ("false", "true")
                for rows in (PROMPT_TILE_ROWS if type_ in _EVERY_TILE else PROMPT_TILE_ROWS[-1:])
            ),
            Kernel("project", f"project<kResidual,false,1,{row.warps * 32},{row}>"),
            Kernel("experts", f"expert_gate_up<{row},{max(1, 8 // row.warps)}>"),
            Kernel("experts", f"expert_down<{short},{8 * short.warps * 32}>"),
        ]
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    wanted = kernels()
    compiled = compile_kernels(wanted, arch, tmp_path)
    assert set(compiled) == set(wanted)
    assert not {kernel.expression: found.spilled for kernel, found in compiled.items() if found.spilled}
    assert all(found.cubin.startswith(b"\x7fELF") and found.registers for found in compiled.values())


def test_compiled_kernels_come_from_the_cache(tmp_path: Path) -> None:
    kernel = Kernel("layout", "to_planes")
    first = compile_kernels([kernel], 90, tmp_path)
    (path,) = tmp_path.iterdir()
    told: list[tuple[int, int]] = []
    assert compile_kernels([kernel], 90, tmp_path, lambda done, of: told.append((done, of))) == first
    assert told == [(1, 1)]
    path.write_bytes(path.read_bytes()[:-1])  # cut short: compiled again
    assert compile_kernels([kernel], 90, tmp_path)[kernel].symbol == first[kernel].symbol


def test_a_mistake_names_the_kernel_and_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"compile no_such_kernel for sm_90: .*no_such_kernel"):
        compile_kernels([Kernel("layout", "no_such_kernel"), Kernel("layout", "to_planes")], 90, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".kernel"]


def test_kernels_are_kept_for_a_user_without_home_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: object, **options: object) -> Path:
        raise RuntimeError("no home")

    made = Compiled(b"\x7fELF", "symbol", 1, 0, 0.1)
    monkeypatch.delenv("STRATA_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_path", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compile, "_key", lambda kernel, arch: "k")
    monkeypatch.setattr(compile, "_compile_all", lambda kernels, arch: [(kernel, made) for kernel in kernels])
    kernel = Kernel("layout", "to_planes")
    assert compile_kernels([kernel], 90) == {kernel: made}
    (kept,) = tmp_path.rglob("*.kernel")
    assert kept.parent.name == "kernels"
    monkeypatch.setattr(compile, "_compile_all", lambda kernels, arch: pytest.fail("compiled again"))
    assert compile_kernels([kernel], 90) == {kernel: made}


def test_a_chosen_folder_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compile, "_key", lambda kernel, arch: "k")
    with pytest.raises(KernelError, match="STRATA_CACHE_DIR=DIR"):
        compile_kernels([Kernel("layout", "to_planes")], 90)
