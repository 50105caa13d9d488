"""The `kdagen` command: exit codes, messages, the verbs that need neither torch nor triton, start-up time."""

import json
import os
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from kdagen import dispatch, families, files, loader, project
from kdagen.cli import main


@pytest.fixture
def kdagen(tmp_path, monkeypatch):
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "cache"))
    dispatch.reset()

    def run(*arguments, code=0):
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, result.output + repr(result.exception)
        assert "Traceback" not in result.output
        return result.output

    return run


def test_check_and_render_check_are_clean(kdagen):
    assert "all in order" in kdagen("check")
    assert "up to date" in kdagen("render", "--check")
    assert kdagen("render", "--diff")


def test_render_chunk_size_64_is_the_committed_set(kdagen):
    output = kdagen("render", "--chunk-size", "64", "--check")
    assert f"{len(project.committed_set())} of {len(project.committed_set())} modules" in output


@pytest.mark.parametrize("chunk", ["16", "32", "128"])
def test_render_into_a_folder(kdagen, tmp_path, chunk):
    out = tmp_path / "out"
    kdagen("render", "--chunk-size", chunk, "--out", str(out))
    rendered = project.python_files(out)
    for family in families.everyone():
        assert any(path.startswith(f"{family.name}/") for path in rendered)
        if family.chunked:
            assert any(f"__c{chunk}_" in path or f"__c{chunk}." in path for path in rendered)
    assert "0 written" in kdagen("render", "--chunk-size", chunk, "--out", str(out))
    victim = out / rendered[0]
    victim.write_text("damaged\n")
    assert "differs" in kdagen("render", "--chunk-size", chunk, "--out", str(out), "--check", code=1)
    assert "damaged" in kdagen("render", "--chunk-size", chunk, "--out", str(out), "--diff", code=1)
    kdagen("render", "--chunk-size", chunk, "--out", str(out))
    stray = victim.with_name("stray__c64.py")
    stray.write_text("")
    assert "removed" in kdagen("render", "--chunk-size", chunk, "--out", str(out), "--prune") and not stray.exists()


def test_a_rendered_folder_is_used_by_dispatch(kdagen, tmp_path, monkeypatch):
    out = tmp_path / "out"
    kdagen("render", "--chunk-size", "32", "--family", "step_tables", "--out", str(out))
    monkeypatch.setenv("KDAGEN_VARIANT_PATH", str(out))
    monkeypatch.setenv("KDAGEN_MODE", "strict")
    spec = next(families.get("step_tables").chunk_specs(32))
    module = loader.load(project.default_variants(spec)[0])
    assert module.__file__.startswith(str(out)) and callable(module.launch)


@pytest.mark.parametrize("arguments, words", [
    (["render", "--chunk-size", "48"], "16, 32, 64, 128"),
    (["render", "--family", "nothing"], "step_tables"),
    (["render", "--head-dim", "wide"], "K,V"),
    (["render", "--block", "bv"], "bv=64"),
    (["render", "--variant", "nothing__c64"], "family"),
    (["render", "--chunk-size", "64", "--prune"], "--prune"),
    (["show", "step_tables"], "kdagen list"),
    (["compile", "--target", "sm75"], "sm90"),
    (["explain", "step_tables", "--device", "abacus"], "h200"),
    (["explain", "nothing"], "step_tables"),
    (["explain", "step_tables", "--device", "h200", "--seqs", "0"], "--seqs"),
    (["compile", "-j", "0"], "--jobs"),
    (["render", "--chunk-size", "32", "--out", "/dev/null/out"], "/dev/null"),
    (["render", "--stdout", "--check"], "--check"),
    (["render", "--stdout", "--out", "x", "--diff"], "--diff, --out"),
    (["render", "--family", "prefill_prepare", "--block", "form=foo"], "portable, gluon, levels"),
    (["render", "--family", "recurrent", "--block", "form=tma"], "portable"),
    (["render", "--family", "prefill_state", "--block", "foo=3"], "bv"),
    (["render", "--flag", "nothing"], "half_state"),
    (["render", "--family", "recurrent", "--chunk-size", "32"], "recurrent has no chunks"),
    (["render", "--family", "recurrent", "--head-dim", "300"], "docs/limits.md"),
    (["explain", "recurrent", "--device", "h200", "--chunk-size", "48"], "16, 32, 64, 128"),
    (["explain", "recurrent", "--device", "h200", "--chunk-size", "64"], "recurrent has no chunks"),
    (["explain", "recurrent", "--device", "h200", "--head-dim", "300"], "docs/limits.md"),
    (["explain", "chunk_kda", "--device", "h200", "--flag", "width=4"], "gate"),
    (["tuned", "diff", __file__], "a row file of the sweep"),
    (["tuned", "merge", __file__], "a row file of the sweep"),
])
def test_refusals_exit_2_with_a_reason(kdagen, arguments, words):
    assert words in kdagen(*arguments, code=2)


def test_list_and_show(kdagen):
    listed = json.loads(kdagen("list", "--json"))
    assert {row["variant"] for row in listed} == {v.name for v in project.committed_set()}
    assert len(json.loads(kdagen("list", "--families", "--json"))) == len(families.NAMES)
    name = listed[0]["variant"]
    committed = (files.generated_dir() / project.committed_set()[0].path).read_text()
    assert kdagen("show", name) == committed
    mapped = kdagen("show", name, "--map").splitlines()
    assert len(mapped) == len(committed.splitlines()) and all(".py.j2:" in line for line in mapped)


@pytest.mark.parametrize("family", families.NAMES)
@pytest.mark.parametrize("device", ["h200", "mi300x", "sm80"])
def test_explain_needs_no_gpu(kdagen, family, device):
    rows = json.loads(kdagen("explain", family, "--device", device, "--json"))
    assert any(row["why"].startswith("picked") for row in rows)


def test_explain_knows_the_families_of_every_public_op(kdagen):
    import kdagen as package
    from kdagen import families as known

    ops = {name for name, module in package._PUBLIC.items() if module.startswith("ops.")}
    assert set(known.OPS) == ops and {name for names in known.OPS.values() for name in names} == set(known.NAMES)
    rows = json.loads(kdagen("explain", "chunk_kda", "--device", "h200", "--json"))
    assert {row["spec"].split("__")[0] for row in rows} == set(known.OPS["chunk_kda"])


def test_a_flag_is_for_the_families_that_have_it(kdagen, tmp_path):
    rows = json.loads(kdagen("explain", "chunk_kda", "--device", "h200", "--flag", "gate=softplus", "--json"))
    found = {row["spec"].split("__")[0]: row["spec"] for row in rows}
    assert set(found) == set(families.OPS["chunk_kda"])
    assert "softplus" in found["prefill_prepare"] and "softplus" not in found["prefill_state"]
    out = tmp_path / "out"
    kdagen("render", "--chunk-size", "32", "--flag", "gate=softplus", "--out", str(out))
    rendered = project.python_files(out)
    assert {path.split("/")[0] for path in rendered} == set(families.NAMES)
    assert all("softplus" in path for path in rendered if path.startswith("prefill_prepare/"))


def test_a_form_is_rendered_with_its_own_blocks(kdagen):
    asked = ["--family", "prefill_prepare", "--block", "form=gluon", "--flag", "gate=bounded", "--dtype", "bf16"]
    text = kdagen("render", *asked, "--stdout")
    assert "template: prefill_prepare_gluon.py.j2" in text
    assert "template: recurrent.py.j2" in kdagen("render", "--family", "recurrent", "--block", "form=portable", "--stdout")


@pytest.mark.parametrize("what", ["recurrent", "decode_step", "causal_conv1d_update"])
def test_the_tokens_of_a_step_are_its_sequences(kdagen, what):
    asked = ["explain", what, "--device", "h200", "--seqs", "64", "--heads", "32"]
    assert kdagen(*asked) == kdagen(*asked, "--tokens", "64") != kdagen(*asked, "--tokens", "8192")
    assert ": 64 tokens, 64 sequences" in kdagen(*asked)
    prefix = kdagen("explain", "conv", "--device", "h200", "--seqs", "64")
    assert ": 64 or 8192 tokens" in prefix


def test_explain_says_that_the_mode_passes_rows_over(kdagen, monkeypatch):
    before = json.loads(kdagen("explain", "gate", "--device", "h200", "--json"))
    monkeypatch.setenv("KDAGEN_MODE", "default")
    rows = json.loads(kdagen("explain", "gate", "--device", "h200", "--json"))
    assert any(row["rank"] == 1 for row in before) and not any(row["rank"] == 1 for row in rows)
    assert any(row["why"] == "KDAGEN_MODE=default: no row counts" for row in rows)
    assert all("(KDAGEN_MODE=default)" in row["why"] for row in rows if "default rule" in row["why"])


def test_an_empty_difference_says_so(kdagen, tmp_path):
    committed = files.generated_dir() / "tuned" / "sm90-h200.jsonl"
    assert "no difference" in kdagen("tuned", "diff", str(committed))
    assert json.loads(kdagen("tuned", "diff", str(committed), "--json")) == []


def doctor(kdagen):
    return {row["what"]: row["verdict"] for row in json.loads(kdagen("doctor", "--json"))}


def test_doctor_reports(kdagen):
    found = doctor(kdagen)
    assert found["generated/"] == "ok" and found["jinja2"] == "ok" and found["cache"] == "ok"


@pytest.mark.parametrize("variable, value, words", [
    ("KDAGEN_MODE", "foo", "tuned, default or strict"), ("KDAGEN_MODE", "strict", "ok"),
    ("KDAGEN_PIN", "garbage", "kdagen list"), ("KDAGEN_PIN", "recurrent__k128_v128_bf16__bv3_evict1", "power of two"),
    ("KDAGEN_PIN", "recurrent__k128_v128_bf16__bv8_evict1:w1", "ok"),
    ("KDAGEN_VARIANT_PATH", "/nope", "/nope is not a folder"),
    ("KDAGEN_BATCH_INVARIANT", "yes", "this does not"),
])
def test_doctor_tries_the_settings(kdagen, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    found = doctor(kdagen)
    assert words in found[variable] and found["generated/"] == "ok", "each setting has a row of its own"


def test_doctor_tries_the_folders(kdagen, monkeypatch, tmp_path):
    monkeypatch.setenv("KDAGEN_CACHE", "/dev/null/cache")
    monkeypatch.setenv("KDAGEN_VARIANT_PATH", str(tmp_path))
    found = doctor(kdagen)
    assert "cannot be written" in found["cache"] and "MANIFEST.json" in found["KDAGEN_VARIANT_PATH"]
    kdagen("render", "--family", "rmsnorm", "--out", str(tmp_path))
    monkeypatch.setenv("KDAGEN_CACHE", str(tmp_path / "a" / "b"))
    found = doctor(kdagen)
    assert found["cache"] == found["KDAGEN_VARIANT_PATH"] == "ok" and not (tmp_path / "a").exists()


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'triton', 'numpy'):
            raise ImportError(name + ' is not installed here')
sys.meta_path.insert(0, Block())
from kdagen.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [
    ["check"], ["list"], ["render", "--check"], ["render", "--chunk-size", "32", "--out", "OUT"], ["doctor"],
    ["explain", "step_tables", "--device", "h200"], ["tuned", "status"],
])
def test_without_torch_and_triton(arguments, tmp_path):
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    done = subprocess.run([sys.executable, "-c", BLOCK, *arguments], capture_output=True, text=True,
                          env=os.environ | {"KDAGEN_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_compile_says_what_it_lacks(kdagen, monkeypatch, name):
    monkeypatch.setattr("kdagen.cli_tools.find_spec", lambda wanted: None if wanted == name else object())
    assert f"needs {name}" in kdagen("compile", "--family", "gate", code=2)


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "kdagen", "show", "nothing"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "kdagen list" in done.stderr


NO_TRITON = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'triton':
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Block())
import torch, kdagen
host = torch.tensor([0, 5, 70], dtype=torch.int32)
assert kdagen.step_tables(host, host).chunk_offsets.tolist() == [0, 1, 3]
q = torch.randn(1, 70, 2, 16)
for op in (kdagen.chunk_kda, kdagen.fused_recurrent_kda):
    assert op(q, q, q, -q.abs(), q[..., 0].sigmoid(), cu_seqlens=host)[0].isfinite().all()
assert 'triton' not in sys.modules and kdagen.kda_decode_step
"""


def test_the_cpu_path_needs_no_triton(tmp_path):
    done = subprocess.run([sys.executable, "-c", NO_TRITON], capture_output=True, text=True,
                          env=os.environ | {"KDAGEN_CACHE": str(tmp_path), "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_at_once():
    """Under 0.3 s: the best of several, because two busy cores are not the command's fault."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "from kdagen.cli import main; main(['--help'])"], check=True,
                       capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3, times
