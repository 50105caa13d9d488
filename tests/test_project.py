"""generated/ is exactly what it should be, and `check` notices every way in which it is not."""

import dataclasses
import json
import shutil

import pytest

from kdagen import files, manifest, project, table
from kdagen.render import inputs_hash

ALL = project.committed_set()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of generated/ that the test may damage; everything looks at it."""
    folder = tmp_path / "generated"
    shutil.copytree(files.generated_dir(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(files, "generated_dir", lambda: folder)
    return folder


def errors(folder):
    return [f"{finding.what}: {finding.why}" for finding in project.check(folder) if finding.error]


def test_the_committed_set_is_in_order():
    assert errors(files.generated_dir()) == []
    assert ALL, "nothing is committed"


def test_each_committed_spec_has_its_default_and_nothing_else(copy):
    on_disk = set(project.python_files(copy))
    assert on_disk == {variant.path for variant in ALL}


def test_missing_file(copy):
    (copy / ALL[0].path).unlink()
    assert any(ALL[0].path in e and "missing" in e for e in errors(copy))


def test_orphan_file(copy):
    (copy / ALL[0].path).with_name("stray__c64.py").write_text("a = 1\n")
    assert any("stray__c64" in e and "orphan" in e for e in errors(copy))


def test_edited_file(copy):
    path = copy / ALL[0].path
    path.write_text(path.read_text() + "# edited\n")
    found = errors(copy)
    assert any("differs" in e for e in found) and any("hash" in e for e in found)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99, "variants": {}}', '{"format": 1, "variants": {"a": {}}}'])
def test_corrupted_manifest(copy, text):
    (copy / manifest.NAME).write_text(text)
    assert any(manifest.NAME in e for e in errors(copy))


def test_manifest_with_a_wrong_entry(copy):
    entries = manifest.read(copy)
    entries[ALL[0].name]["inputs"] = "0" * 64
    entries["no_such__c64"] = dict(entries[ALL[0].name])
    manifest.write(copy, entries)
    found = "\n".join(errors(copy))
    assert "other templates" in found and "no_such__c64" in found


def row(variant, **changes):
    fields = dict(variant=variant.name, load=(5, 6), warps=4, stages=1, us=10.0, default_us=12.0, next_us=11.0, noise=0.01,
                  err=1e-3, repeat=20, inputs=inputs_hash(variant),
                  env={"gpu": "test", "slug": "h200", "sms": 132, "triton": "3.6.0"})
    return table.Row(**fields | changes)


def test_table_rows_are_checked(copy):
    path = copy / "tuned" / "sm90-h200.jsonl"
    path.parent.mkdir(exist_ok=True)
    good = row(ALL[0])
    other = row(ALL[0], load=(7, 6))
    path.write_text("".join(r.line() + "\n" for r in sorted([good, other])))
    before = errors(copy)
    assert not any("jsonl" in e for e in before)
    bad = json.loads(good.line())
    del bad["err"]
    path.write_text(good.line() + "\n" + good.line() + "\nnot json\n" + json.dumps(bad) + "\n")
    found = [e for e in errors(copy) if "jsonl" in e]
    assert any("two rows" in e for e in found)
    assert any(":3" in e for e in found) and any(":4" in e for e in found)


def test_kept_defaults_are_checked(copy):
    path = copy / "tuned" / "sm90-h200.swept"
    assert not any("swept" in e for e in errors(copy))
    path.write_text(path.read_text() + "not json\n")
    assert any("sm90-h200.swept" in e and "tuned row" in e for e in errors(copy))


def test_stale_row_is_a_note(copy):
    path = copy / "tuned" / "sm90-h200.jsonl"
    path.parent.mkdir(exist_ok=True)
    stale = dataclasses.replace(row(ALL[0], inputs="0" * 64), load=(40, 40))
    table.write(path, [*table.read(path), stale])
    assert errors(copy) == []
    assert any("stale" in finding.why for finding in project.check(copy))


def test_write_prune_and_compare(tmp_path):
    some = ALL[:3]
    folder = tmp_path / "out"
    changes = project.write(some, folder, whole=False)
    assert sorted(changes.written) == sorted(v.path for v in some)
    assert project.compare(some, folder, whole=True).clean
    assert project.write(some, folder, whole=False).unchanged == sorted(v.path for v in some)
    (folder / some[0].path).write_text("damaged\n")
    changes = project.compare(some[:2], folder, whole=True)
    assert changes.written == [some[0].path] and changes.extra == [some[2].path] and "damaged" in changes.diffs[0]
    project.write(some[:2], folder, whole=True, prune=True)
    assert set(project.python_files(folder)) == {v.path for v in some[:2]}
    assert set(manifest.read(folder)) == {v.name for v in some[:2]}
