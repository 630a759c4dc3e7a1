from __future__ import annotations

from pathlib import Path

import pytest

from strata.doctor.facts import LibraryFile
from strata.doctor.probes.collect import Unknown
from strata.doctor.probes.libraries import linux_candidates, loaded_file, loader_cache, mapped_file, why_not_loadable
from tests.doctor.probes.machine_tree import lay

LD_CACHE = """1234 libs found in cache `/etc/ld.so.cache'
\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/wsl/lib/libcuda.so.1
\tlibcuda.so (libc6,x86-64) => /usr/lib/wsl/lib/libcuda.so
\tlibcudart.so.1 (libc6) => /usr/lib/libcudart.so.1
"""


def test_distribution_library_that_shadows_the_one_of_wsl(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        {
            "usr/lib/x86_64-linux-gnu/libcuda.so.550.120": "",
            "usr/lib/wsl/lib/libcuda.so.1": "",
            "opt/mine/libcuda.so.1": "",
        },
    )
    (root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").symlink_to("libcuda.so.550.120")
    found = linux_candidates("libcuda.so.1", root, {"LD_LIBRARY_PATH": "/opt/mine:/opt/none:"}, LD_CACHE)
    assert found == (
        LibraryFile(f"{root}/opt/mine/libcuda.so.1", found_by="LD_LIBRARY_PATH"),
        LibraryFile(
            f"{root}/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            target=f"{root}/usr/lib/x86_64-linux-gnu/libcuda.so.550.120",
            version="550.120",
            found_by="ld.so.cache",
        ),
        LibraryFile(f"{root}/usr/lib/wsl/lib/libcuda.so.1", found_by="ld.so.cache"),
    )


def test_folder_reached_twice_is_listed_once(tmp_path: Path) -> None:
    root = lay(tmp_path, {"usr/lib64/libcuda.so.1": ""})
    (root / "lib64").symlink_to("usr/lib64")
    assert [file.path for file in linux_candidates("libcuda.so.1", root, {}, "")] == [f"{root}/lib64/libcuda.so.1"]


def test_wsl_folder_that_the_loader_does_not_search(tmp_path: Path) -> None:
    root = lay(tmp_path, {"usr/lib/wsl/lib/libnvidia-ml.so.1": ""})
    (only,) = linux_candidates("libnvidia-ml.so.1", root, {}, "")
    assert only.found_by == "not searched"


def test_loader_cache_of_this_machine_lists_the_c_library() -> None:
    assert "libc.so.6" in loader_cache()


def test_mapped_file() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 fd:00 12 /usr/lib/libcudart.so.13\n"
        "7f02-7f03 r-xp 00000000 fd:00 13                  /usr/lib/wsl/drivers/x/libcuda.so.1.1\n"
        "7f04-7f05 rw-p 00000000 00:00 0 [heap]\n"
    )
    assert mapped_file(maps, "libcuda.so") == "/usr/lib/wsl/drivers/x/libcuda.so.1.1"
    with pytest.raises(Unknown, match="libnvidia-ml"):
        mapped_file(maps, "libnvidia-ml.so")


def test_loaded_file_of_this_process() -> None:
    assert Path(loaded_file("libc.so")).is_file()


def test_loaders_own_words(tmp_path: Path) -> None:
    fake = tmp_path / "libcuda.so.1"
    fake.write_bytes(b"not a library")
    assert "libcuda.so.1" in why_not_loadable(str(fake))
    assert "by its path it loads" in why_not_loadable(loaded_file("libc.so"))
