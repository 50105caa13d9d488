"""The documentation's code runs: the worked example of docs/adding-a-family.md, and the commands it names."""

import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kdagen import families, files, loader, reference, render
from kdagen.cli import main
from kdagen.spec import Problem, Variant
from kdagen.tuning import cases

ROOT = Path(__file__).parent.parent


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The family of docs/adding-a-family.md, with its template, as if it had been added."""
    python = blocks("docs/adding-a-family.md", "python")
    module = types.ModuleType("rowscale")
    exec(python[0], module.__dict__)
    for path in files.templates_dir().glob("*.j2"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "rowscale.py.j2").write_text(blocks("docs/adding-a-family.md", "jinja")[0])
    original = families.get
    monkeypatch.setattr(families, "get", lambda name: module.FAMILY if name == "rowscale" else original(name))
    monkeypatch.setattr(files, "templates_dir", lambda: tmp_path)
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "cache"))
    caches = (render._environment, render.template_sources, render._inputs_hash, render.render, loader.load)
    for cache in caches:
        cache.cache_clear()
    yield module.FAMILY
    for cache in caches:
        cache.cache_clear()


def test_the_worked_example_renders_and_computes(example, rng):
    for spec in example.committed():
        schedule = example.default(spec)
        assert example.supports(spec, schedule, None) is None
        variant = Variant(spec, schedule.source_key)
        text = render.render(variant).text
        compile(text, variant.path, "exec")
        if spec.dtype == "fp32" and not torch.cuda.is_available():
            module = loader.load(variant)
            x, s = torch.randn(13, 70, generator=rng), torch.randn(13, generator=rng)
            y = torch.full_like(x, float("nan"))
            module.launch(x, s, y)
            torch.testing.assert_close(y, x * s[:, None])
        assert "\n\n\ndef launch(" in text, "its blank lines are as in the template"


def test_the_worked_example_has_an_op(example, rng, monkeypatch):
    """The op's snippet runs as it stands, kernels and CPU path; so does the sweep's case."""
    op, oracle = types.ModuleType("kdagen.ops.rowscale"), types.ModuleType("oracle")
    code = blocks("docs/adding-a-family.md", "python")
    exec(code[2], oracle.__dict__)
    monkeypatch.setattr(reference, "row_scale", oracle.row_scale, raising=False)
    exec(code[1], op.__dict__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, s = torch.randn(13, 70, generator=rng).to(device), torch.randn(13, generator=rng).to(device)
    torch.testing.assert_close(op.row_scale(x, s), x * s[:, None])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch.testing.assert_close(op.row_scale(x.cpu(), s.cpu()), (x * s[:, None]).cpu())

    monkeypatch.setitem(sys.modules, "kdagen.ops.rowscale", op)
    monkeypatch.setattr(cases, "_CASES", {})
    exec(next(block for block in blocks("docs/tuning.md", "python") if "RowScale" in block), {})
    case, spec = cases.get("rowscale"), example.committed()[1]
    inputs = case.inputs(spec, Problem(13, 1, 1), 0, torch.device("cpu"))
    torch.testing.assert_close(case.run(spec, inputs)["y"].double(), case.oracle(spec, inputs)["y"], rtol=1e-6, atol=1e-6)
    assert case.bytes_moved(spec, Problem(13, 1, 1)) == 2 * 13 * 128 * 4


def test_the_worked_example_names_what_must_know_the_family():
    """Each table that a new family or op has to enter is named in the document."""
    text = (ROOT / "docs" / "adding-a-family.md").read_text()
    for name, path in (("NAMES", "codegen/families/__init__.py"), ("OPS", "codegen/families/__init__.py"),
                       ("_PUBLIC", "codegen/__init__.py"), ("MODULES", "codegen/tuning/cases.py")):
        assert f"`{name}`" in text and f"`{path}`" in text and f"\n{name}" in (ROOT / path).read_text()


def test_the_worked_example_reports_its_template_line(example, tmp_path):
    path = tmp_path / "rowscale.py.j2"
    path.write_text(path.read_text().replace("blocks.bt }}\n    o_d", "blokcs.bt }}\n    o_d"))
    render.template_sources.cache_clear()
    render._inputs_hash.cache_clear()
    render._environment.cache_clear()
    spec = example.committed()[0]
    with pytest.raises(Exception, match=r"templates/rowscale\.py\.j2:\d+: 'blokcs' is undefined"):
        render.render(Variant(spec, example.default(spec).source_key))


def documented_commands() -> set[str]:
    """The verbs of `kdagen ...` in every document."""
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    commands = "\n".join(re.findall(r"`[^`\n]*kdagen [^`\n]*`|^kdagen .*$", text, re.M))
    return set(re.findall(r"`?kdagen ([a-z]+)(?= |`|\n)", commands))


def test_every_documented_command_exists():
    verbs = documented_commands()
    assert {"render", "check", "compile", "explain"} <= verbs
    assert verbs <= set(main.commands), verbs - set(main.commands)


@pytest.mark.parametrize("document", [path.name for path in sorted((ROOT / "docs").glob("*.md"))])
def test_links_between_documents_lead_somewhere(document):
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / document).read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (ROOT / "docs" / target).exists(), target
    for target in re.findall(r"`((?:codegen|scripts|templates|docs|tests)/[\w./-]+\.\w+)`", text):
        if "rowscale" not in target and "<" not in target and "prefill_state.py.j2:47" not in target:
            assert (ROOT / target).exists(), target


def readme_commands() -> list[str]:
    """The lines of README's shell blocks that can run here: not its two scripts, nothing that needs a GPU."""
    lines = [line.split("#")[0].strip() for block in blocks("README.md", "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("bash scripts/") and "--budget" not in line]


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_run(command, tmp_path):
    environment = os.environ | {"KDAGEN_CACHE": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    words = shlex.split(command)
    if words[0] == "kdagen":
        words = [sys.executable, "-c", "from kdagen.cli import main; main()", *words[1:]]
    else:
        words = [sys.executable, str(ROOT / words[1]), *words[2:]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("document, words", [("README.md", "'family': 'step_tables'"), ("docs/metadata.md", "")])
def test_the_python_of_documents_runs(document, words, tmp_path):
    """All Python blocks, one after another, as a reader would paste them, on the CPU path."""
    code = "\n".join(blocks(document, "python"))
    environment = os.environ | {"KDAGEN_CACHE": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.parametrize("script", ["targets.py", "plot.py", "accuracy.py", "loop.py"])
def test_tables_are_what_the_json_says(script):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run: python scripts/{script}\n{done.stdout}{done.stderr}"
