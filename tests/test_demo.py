"""`kdagen demo`: it agrees with the oracle, says what ran, and fails if a result differs."""

import os
import subprocess
import sys

import pytest


def demo(tmp_path, *arguments, patch="", **environment):
    code = f"{patch}\nfrom kdagen.cli import main\nmain(['demo', *{list(arguments)!r}])"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=clean | {"KDAGEN_CACHE": str(tmp_path)} | environment)


def test_it_agrees_and_names_variant_and_reason(tmp_path):
    done = demo(tmp_path, "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("Running on", "step_tables__c64", "chosen: ", "kdagen explain", "Prefill, then decode",
                  "served together", "Every result agrees"):
        assert words in done.stdout, words
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["kdagen.reference.tables.chunk_table", "kdagen.reference.recurrent_kda"])
def test_a_wrong_result_is_said_and_exits_1(tmp_path, name):
    module, function = name.rsplit(".", 1)
    patch = (f"import {module} as m\nright = m.{function}\n"
             f"def wrong(*a, **k):\n    first, second = right(*a, **k)\n    return first + 1, second\nm.{function} = wrong")
    done = demo(tmp_path, patch=patch) if "recurrent" in name else demo(tmp_path, "--quick", patch=patch)
    assert done.returncode == 1 and "DIFFERS" in done.stdout and "differs from its oracle" in done.stdout


def test_without_torch_it_says_what_to_do(tmp_path):
    done = demo(tmp_path, patch="import importlib.util as u\nfind = u.find_spec\n"
                                "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)")
    assert done.returncode == 1 and "pip install" in done.stdout
