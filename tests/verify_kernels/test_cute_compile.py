"""The shipped kernels compile for sm_90a without a GPU: matrix instructions, no spills, a complete cache key."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import PackagePath
from pathlib import Path

import pytest
import torch

from tests.verify_kernels.compiled import compile_remarks
from verify_kernels.cute import compile as kernels
from verify_kernels.cute.attention.run import choose, plan
from verify_kernels.errors import KernelError

needs_dsl = pytest.mark.skipif(kernels.dsl_version() == "none", reason="nvidia-cutlass-dsl is not installed")

# What a Qwen3-8B tree, a wide tree and a chain of any length use.
SHIPPED = [
    choose(torch.bfloat16, 128, 32, 8, 16, "tree", 16),
    choose(torch.bfloat16, 128, 32, 8, 16, "tree", 64),
    choose(torch.float16, 64, 14, 2, 32, "causal", 300),
    choose(torch.bfloat16, 128, 32, 8, 16, "tree", 16, fp8=True),
]


@needs_dsl
@pytest.mark.parametrize("variant", SHIPPED, ids=lambda v: v.name)
def test_compiles_without_spills_or_serialised_products(variant, tmp_path):
    remarks = compile_remarks(variant, tmp_path)
    spills = re.findall(r"(\d+) bytes spill", remarks)
    assert spills and all(int(n) == 0 for n in spills), remarks
    assert "wgmma.mma_async instructions are serialized" not in remarks
    (ptx,) = tmp_path.glob("*.ptx")
    text = ptx.read_text()
    # Scores of the first tile, of unmasked and of masked tiles; values in both loops and after the last tile.
    products = 3 * (variant.head_dim // 16 + variant.tile_n // 16)
    assert len(re.findall(r"wgmma\.mma_async", text)) == products
    assert "cp.async.bulk.tensor" in text


def test_cache_key_names_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    variant = SHIPPED[0]
    first = kernels.library(variant, tmp_path)
    assert kernels.library(variant, tmp_path) == first
    assert kernels.library(SHIPPED[1], tmp_path) != first
    for name, value in (("ARCH", "sm_100a"), ("dsl_version", lambda: "0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, name, value)
            kernels.fingerprint.cache_clear()
            assert kernels.library(variant, tmp_path) != first
    kernels.fingerprint.cache_clear()
    assert kernels.library(variant, tmp_path) == first


def test_without_the_dsl_only_libraries_of_these_sources_load(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    built = kernels.library(SHIPPED[0], tmp_path)
    stale = built.with_name(f"{SHIPPED[0].name}-0123456789abcdef-dsl4.8.1.so")
    stale.touch()
    monkeypatch.setattr(kernels, "dsl_version", lambda: "none")
    with pytest.raises(KernelError, match="found 0 libraries of these sources"):
        kernels.build(SHIPPED[0], tmp_path)
    built.touch()
    assert kernels.build(SHIPPED[0], tmp_path) == built


def test_cache_key_follows_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    first = kernels.library(SHIPPED[0], tmp_path)
    for source in Path(kernels.__file__).parent.rglob("*.py"):
        target = tmp_path / "cute" / source.relative_to(Path(kernels.__file__).parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text() + "\n# changed\n")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "cute" / "compile.py"))
    kernels.fingerprint.cache_clear()
    assert kernels.library(SHIPPED[0], tmp_path) != first
    monkeypatch.undo()
    kernels.fingerprint.cache_clear()


class Package:
    """What importlib.metadata says of one installed package."""

    def __init__(self, name: str, folder: Path, sizes: dict[str, int]) -> None:
        self.metadata, self.folder = {"Name": name}, folder
        self.files = []
        for file, size in sizes.items():
            entry = PackagePath(file)
            entry.size = size
            self.files.append(entry)

    def locate_file(self, file: PackagePath) -> Path:
        return self.folder / file


def test_an_install_whose_packages_overwrote_each_other_is_named(tmp_path, monkeypatch):
    def install(*packages: Package) -> None:
        monkeypatch.setattr(kernels.importlib.metadata, "distributions", lambda: packages)

    install(Package("numpy", tmp_path, {"gone.py": 3}))
    with pytest.raises(KernelError, match="nvidia-cutlass-dsl: not installed"):
        kernels.check_install()
    (tmp_path / "libdsl.so").write_bytes(b"cu13 file")
    new = Package("nvidia-cutlass-dsl-libs-cu13", tmp_path, {"libdsl.so": 9})
    install(new)
    kernels.check_install()
    install(new, Package("nvidia-cutlass-dsl-libs-cu12", tmp_path, {"libdsl.so": 7}))
    with pytest.raises(KernelError, match=r"libs-cu12: found 9 bytes in libdsl.so, expected 7; .*uninstall -y .*cu12 .*cu13"):
        kernels.check_install()
    (tmp_path / "libdsl.so").unlink()
    with pytest.raises(KernelError, match=r"libs-cu13: found nothing in libdsl.so, expected 9"):
        kernels.check_install()


def test_build_reuses_what_the_folder_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "dsl_version", lambda: "4.8.1")
    path = kernels.library(SHIPPED[0], tmp_path)
    path.write_bytes(b"kept")
    assert kernels.build(SHIPPED[0], tmp_path) == path
    assert path.read_bytes() == b"kept"


def test_tiles_follow_the_rows():
    tiles = {q: choose(torch.bfloat16, 128, 32, 8, 16, "tree", q) for q in (1, 16, 17, 32, 33, 64)}
    assert {q: (v.rows, v.blocks) for q, v in tiles.items()} == {
        1: (64, 1), 16: (64, 1), 17: (128, 1), 32: (128, 1), 33: (128, 2), 64: (128, 2),
    }  # fmt: skip


def test_errors_name_the_field():
    with pytest.raises(KernelError, match=r"dtype is torch.float32, allowed"):
        choose(torch.float32, 128, 32, 8, 16, "tree", 8)
    with pytest.raises(ValueError, match=r"ancestor_masks are none, allowed"):
        offsets = torch.tensor([0, 1], dtype=torch.int32)
        plan(SHIPPED[0], torch.zeros(1, 1, dtype=torch.int32), offsets[:1], offsets, None, 1)


@needs_dsl
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("head_dim", 96, "head_dim is 96, allowed: 64, 128"),
        ("page_size", 48, "page_size is 48, allowed: 16, 32, 64, 128"),
        ("kv_heads", 5, "heads / kv_heads is 32 / 5, allowed"),
        ("mask", "prefix", "mask is 'prefix', allowed: tree, causal, full"),
        ("stages", 3, "stages is 3, allowed with 64 rows: an even number"),
    ],
)
def test_unsupported_variants(field, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        kernels.compile_variant(dataclasses.replace(SHIPPED[0], **{field: value}))
