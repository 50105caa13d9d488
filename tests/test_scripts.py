"""The scripts that rewrite documents say what they did, and what they need."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("script", ["accuracy", "benchmark"])
def test_what_measures_says_that_there_is_no_gpu(script):
    done = run(str(SCRIPTS / f"{script}.py"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"{script}: no GPU on this machine")


@pytest.fixture(scope="module")
def documents():
    spec = importlib.util.spec_from_file_location("script_documents", SCRIPTS / "documents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_document_is_written_once_and_told(documents, tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text("a\n<!-- x -->\nold\n<!-- /x -->\n<!-- y -->b<!-- /y -->\n")
    text = documents.marked(path.read_text(), "x", "new")
    assert text == "a\n<!-- x -->\nnew\n<!-- /x -->\n<!-- y -->b<!-- /y -->\n"
    assert documents.put(path, text, check=True, command="mend it")
    told = capsys.readouterr().err
    assert "-old" in told and "+new" in told and "mend it" in told and "old" in path.read_text()
    assert documents.put(path, text, check=False, command="mend it") and path.read_text() == text
    assert not documents.put(path, text, check=False, command="mend it")
    assert not documents.put(path, text, check=True, command="mend it")
    told = capsys.readouterr()
    assert told.out.splitlines() == [f"wrote the tables of {path}", f"unchanged: {path}", f"up to date: {path}"]
    assert not told.err
