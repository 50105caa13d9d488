"""The wheel: built, installed into a fresh environment, used from another folder; and the editable layout."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, cwd, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, env=clean | environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_wheel_in_a_fresh_environment(tmp_path):
    source = tmp_path / "source"
    run("git", "clone", "--quiet", ROOT, source, cwd=tmp_path) if (ROOT / ".git").exists() else None
    if not source.exists():
        pytest.skip("not a git checkout")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, source,
        cwd=tmp_path)
    wheel = next(tmp_path.glob("kdagen-*.whl"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    kdagen = tmp_path / "env" / "bin" / "kdagen"
    assert "all in order" in run(kdagen, "check", cwd=away)
    run(kdagen, "render", "--check", cwd=away)
    run(kdagen, "render", "--chunk-size", "32", "--out", away / "out", cwd=away)
    assert list((away / "out").rglob("*c32*.py"))
    assert "picked" in run(kdagen, "explain", "step_tables", "--device", "h200", cwd=away)
    code = "import kdagen, kdagen.generated; print(kdagen.__path__[0], kdagen.generated.__path__[0])"
    where = run(python, "-c", code, cwd=away)
    assert all(str(tmp_path / "env") in path for path in where.split())


def test_every_module_is_in_the_package_list():
    """A package that pyproject.toml forgets would be missing from the wheel."""
    from kdagen.devices import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {"kdagen" + "".join(f".{part}" for part in path.parent.relative_to(ROOT / "codegen").parts)
             for path in (ROOT / "codegen").rglob("__init__.py")}
    assert found | {"kdagen.templates", "kdagen.generated"} == listed


def test_unknown_public_name_is_refused():
    import kdagen

    with pytest.raises(AttributeError, match="step_tables"):
        _ = kdagen.no_such_op


def test_public_names_exist():
    import kdagen

    for name in kdagen.__all__:
        assert getattr(kdagen, name).__doc__, name
