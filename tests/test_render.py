"""Rendering: deterministic bytes, errors that name template and line, the source map, whole-file writes."""

import ast
import os
import subprocess
import sys

import pytest

from kdagen import families, files, project, render
from kdagen.errors import RenderError, Unsupported
from kdagen.families.base import Family
from kdagen.spec import CHUNKS, Schedule, Spec, Variant

ALL = project.committed_set()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A family named toy whose template the test writes; everything else as shipped."""
    class Toy(Family):
        name = "toy"
        chunked = True

        def default(self, spec, target=None, problem=None):
            return Schedule.make(bv=8)

        def supports(self, spec, schedule, target):
            return self.refuse_chunk(spec)

    def write(text, name="toy.py.j2"):
        (tmp_path / name).write_text(text)
        return Variant(Spec("toy", chunk=64), Schedule.make(warps=0, stages=0, bv=8))

    original = families.get
    monkeypatch.setattr(families, "get", lambda name: Toy() if name == "toy" else original(name))
    monkeypatch.setattr(files, "templates_dir", lambda: tmp_path)
    clear()
    yield write
    clear()


def clear():
    for cached in (render._environment, render.template_sources, render._inputs_hash, render.render):
        cached.cache_clear()


def test_control_flow_values_and_source_map(toy):
    variant = toy("a = {{ blocks.bv }}\n#% for s in [1, 2]\nb{{ s }} = {{ spec.chunk }}\n#% endfor\nc = 3\n\nd = 4\n")
    rendered = render.render(variant, source_map=True)
    body = rendered.text.splitlines()[render.HEADER_LINES:]
    assert body == ["a = 8", "b1 = 64", "b2 = 64", "c = 3", "", "d = 4"]
    assert [line for _, line in rendered.source_map[render.HEADER_LINES:]] == [1, 3, 3, 5, 6, 7]
    assert len(rendered.source_map) == len(rendered.text.splitlines())
    assert render.locate(variant, render.HEADER_LINES + 3) == "templates/toy.py.j2:3"


def test_source_map_follows_macros(toy):
    toy("#% macro m(x)\n# in the macro\ny = {{ x }}\n#% endmacro\n", name="_m.py.j2")
    variant = toy('#% from "_m.py.j2" import m\na = 1\n{{ m(5) }}\n')
    rendered = render.render(variant, source_map=True)
    lines = rendered.text.splitlines()
    assert rendered.source_map[lines.index("y = 5")] == ("_m.py.j2", 3)


@pytest.mark.parametrize("text, line, word", [
    ("a = 1\nb = {{ nothing }}\n", 2, "nothing"),
    ("a = 1\n\n#% if\nb\n", 3, "expected"),
    ("x\n{{ 1 // 0 }}\n", 2, "zero"),
])
def test_errors_name_template_and_line(toy, text, line, word):
    with pytest.raises(RenderError, match=rf"templates/toy\.py\.j2:{line}:.*") as error:
        render.render(toy(text))
    assert word in str(error.value).lower()


def test_missing_include_is_named(toy):
    with pytest.raises(RenderError, match=r"_gone\.py\.j2"):
        render.render(toy('#% include "_gone.py.j2"\n'))


def test_unsupported_variant_is_refused_with_the_reason(toy):
    toy("a = 1\n")
    with pytest.raises(Unsupported, match="48"):
        render.render(Variant(Spec("toy", chunk=48), Schedule.make(warps=0, stages=0)))


def test_inputs_change_with_template_include_spec_and_blocks(toy):
    toy("z = 1\n", name="_i.py.j2")
    base = toy('#% include "_i.py.j2"\n')
    first = render.inputs_hash(base)
    assert first != render.inputs_hash(Variant(base.spec, Schedule.make(warps=0, stages=0, bv=16)))
    assert first != render.inputs_hash(Variant(Spec("toy", chunk=32), base.schedule))
    assert first == render.inputs_hash(Variant(base.spec, Schedule.make(warps=8, stages=3, bv=8)))
    toy("z = 2\n", name="_i.py.j2")
    clear()
    assert first != render.inputs_hash(base)


def test_everything_twice_gives_the_same_bytes():
    """In another process, with another hash seed, in another folder."""
    code = ("from kdagen import project, render, files\n"
            "print(files.digest(''.join(render.render(v).text for v in project.committed_set())))")
    here = files.digest("".join(render.render(v).text for v in ALL))
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=True)
        assert out.stdout.strip() == here


@pytest.mark.parametrize("variant", ALL, ids=lambda v: v.name)
def test_generated_module_is_readable_python(variant):
    text = render.render(variant).text
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a generated file says what it computes"
    imported = {(node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
                for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    assert {name.split(".")[0] for name in imported} <= {"torch", "triton", "__future__"}
    launches = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("launch")]
    assert launches and all(ast.get_docstring(node) for node in launches)
    literals = {t.id: ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
                for t in node.targets if getattr(t, "id", "") in ("SPEC", "SCHEDULE")}
    assert Spec.of_literal(literals["SPEC"]) == variant.spec
    assert Schedule.make(warps=0, stages=0, **literals["SCHEDULE"]) == variant.schedule
    assert "\t" not in text and text.endswith("\n") and max(map(len, text.splitlines())) <= 140
    assert not any(line.endswith(" ") for line in text.splitlines())
    for word in ("/home/", "/root", "/work", "/tmp", "202"):
        assert word not in "\n".join(line for line in text.splitlines() if "inputs:" not in line), word


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_size_renders(chunk):
    for family in families.everyone():
        if family.chunked:
            for spec in family.chunk_specs(chunk):
                for variant in project.default_variants(spec):
                    compile(render.render(variant).text, variant.path, "exec")


def test_write_if_different_is_whole_and_quiet(tmp_path):
    path = tmp_path / "a" / "b.py"
    assert files.write_if_different(path, "x\n")
    before = path.stat().st_mtime_ns
    assert not files.write_if_different(path, "x\n")
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in path.parent.iterdir()] == ["b.py"]


def test_a_failed_render_leaves_nothing(toy, tmp_path):
    good, out = toy("a = 1\n"), tmp_path / "out"
    bad = Variant(Spec("toy", chunk=48), good.schedule)
    with pytest.raises(Unsupported):
        project.write([good, bad], out, whole=False)
    assert not out.exists()
