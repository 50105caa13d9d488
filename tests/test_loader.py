"""Finding, rendering and importing variants: the cache, KDAGEN_VARIANT_PATH, strict mode, many processes."""

import logging
import os
import shutil
import subprocess
import sys

import pytest

from kdagen import dispatch, families, files, loader, manifest, project
from kdagen.errors import ArgumentError, KdagenError, NoVariant
from kdagen.render import render
from kdagen.spec import CHUNKS, Variant


def uncommitted() -> Variant:
    """A supported variant that is not under generated/."""
    committed = set(project.committed_set())
    for family in families.everyone():
        if family.chunked:
            for chunk in CHUNKS:
                for spec in family.chunk_specs(chunk):
                    for variant in project.default_variants(spec):
                        if variant not in committed:
                            return variant
    raise AssertionError("every chunk size is committed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KDAGEN_VARIANT_PATH", raising=False)
    monkeypatch.delenv("KDAGEN_MODE", raising=False)
    loader._said.clear()
    dispatch.reset()
    yield tmp_path / "cache"
    dispatch.reset()


def test_committed_variants_load_without_rendering(cache):
    variant = project.committed_set()[0]
    assert loader.load(variant).__name__ == f"kdagen.generated.{variant.spec.family}.{variant.name}"
    assert not cache.exists()


def test_an_unrendered_spec_works_and_says_so_once(cache, caplog):
    variant = uncommitted()
    with caplog.at_level(logging.WARNING, "kdagen"):
        module = loader.load(variant)
        loader.load.cache_clear()
        assert loader.load(variant) is module
    assert variant.spec.literal == module.SPEC
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and f"kdagen render --variant {variant.name}" in said[0]


def test_a_damaged_cache_file_is_replaced_before_import(cache):
    variant = uncommitted()
    path = loader.cached(variant)
    path.write_text("raise SystemExit('damaged')\n")
    assert loader.cached(variant) == path and path.read_text() == render(variant).text


def test_strict_mode_refuses_with_the_command(cache, monkeypatch):
    monkeypatch.setenv("KDAGEN_MODE", "strict")
    variant = uncommitted()
    with pytest.raises(NoVariant, match=f"kdagen render --variant {variant.name}") as error:
        loader.load(variant)
    assert "nearest" in str(error.value) and not cache.exists()


def test_unknown_mode_is_refused(cache, monkeypatch):
    monkeypatch.setenv("KDAGEN_MODE", "fast")
    with pytest.raises(ArgumentError, match="KDAGEN_MODE"):
        loader.mode()


def test_variant_path(cache, tmp_path, monkeypatch, caplog):
    variant, folder = uncommitted(), tmp_path / "mine"
    project.write([variant], folder, whole=False)
    monkeypatch.setenv("KDAGEN_VARIANT_PATH", os.pathsep.join([str(tmp_path / "nowhere"), str(folder)]))
    monkeypatch.setenv("KDAGEN_MODE", "strict")
    assert loader.find(variant) == folder / variant.path
    assert loader.load(variant).__file__ == str(folder / variant.path)
    (folder / variant.path).write_text("damaged\n")
    with caplog.at_level(logging.WARNING, "kdagen"):
        assert loader.find(variant) is None
    assert "bytes differ" in caplog.text and "nowhere is not a folder" in caplog.text
    entries = manifest.read(folder)
    entries[variant.name]["inputs"] = "0" * 64
    manifest.write(folder, entries)
    assert loader.find(variant) is None


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff\n")])
def test_a_missing_or_damaged_committed_file_is_rendered_instead(cache, tmp_path, monkeypatch, caplog, damage):
    variant, folder = project.committed_set()[0], tmp_path / "generated"
    shutil.copytree(files.generated_dir(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(files, "generated_dir", lambda: folder)
    assert loader.find(variant) == folder / variant.path
    damage(folder / variant.path)
    with caplog.at_level(logging.WARNING, "kdagen"):
        assert loader.load(variant).__file__.startswith(str(cache))
    assert "Run: kdagen render" in caplog.text


def test_an_unwritable_cache_names_the_variable(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(KdagenError, match=r"KDAGEN_CACHE: got .*file.*--out DIR"):
        loader.load(uncommitted())


def test_many_processes_at_once(cache):
    variant = uncommitted()
    code = ("from kdagen import loader\nfrom kdagen.spec import parse\n"
            f"print(loader.load(parse({variant.name!r})).SPEC)")
    workers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                                env=os.environ | {"KDAGEN_CACHE": str(cache)}) for _ in range(4)]
    outputs = [worker.communicate()[0].strip() for worker in workers]
    assert outputs == [str(variant.spec.literal)] * 4
    assert len(list(cache.rglob("*.py"))) == 1


def test_import_touches_no_gpu_and_prints_nothing():
    code = ("import sys, kdagen\n"
            "assert 'torch' not in sys.modules and 'triton' not in sys.modules and 'jinja2' not in sys.modules\n"
            "import kdagen.ops, torch\n"
            "assert not torch.cuda.is_initialized()\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {"KDAGEN_CACHE": "/nonexistent"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
