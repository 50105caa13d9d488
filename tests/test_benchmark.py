"""The benchmark's driver, its rows, and the figures and tables made of them; no GPU."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from kdagen.tuning import timing

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


def script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def common():
    return importlib.import_module("bench.common")


@pytest.fixture
def ceilings(common, monkeypatch):
    monkeypatch.setattr(common, "copy_ceiling", lambda: 4e12)
    monkeypatch.setattr(common, "matmul_ceiling", lambda: 7e14)


# Rows

def test_median_and_percentiles():
    assert timing.summarize([float(i) for i in range(100, 0, -1)]) == timing.Timing(51.0, 21.0, 81.0, 100)
    assert timing.summarize([3.0]) == timing.Timing(3.0, 3.0, 3.0, 1)
    assert timing.Timing(10.0, 9.5, 10.5, 9).noise == pytest.approx(0.05)


def test_a_row_has_its_floor(common, ceilings):
    made = common.row("decode", "N=1", "kdagen", timing.Timing(10.0, 9.0, 11.0, 5), how="graph", bytes_moved=20e6,
                      operations=1e9, err=1e-3, err_against="fp64", seqs=1, heads=32)
    assert made["floor_us"] == pytest.approx(5.0) and made["share"] == pytest.approx(0.5)
    assert made["tb_s"] == pytest.approx(2.0) and made["heads"] == 32
    bound = common.row("p", "c", "w", timing.Timing(10.0, 9, 11, 5), how="graph", bytes_moved=4e6, operations=3.5e9)
    assert bound["floor_us"] == pytest.approx(5.0), "the larger of bytes and operations"
    with pytest.raises(ValueError, match="graph, eager or host"):
        common.row("p", "c", "w", timing.Timing(1, 1, 1, 1), how="fast")


def test_relative_error(common):
    assert common.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
    assert common.relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    with pytest.raises(ValueError, match="shape"):
        common.relative_error(torch.ones(2), torch.ones(1))


def test_a_budget_stops_before_the_case_that_would_not_fit(common, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: clock[0])
    budget, done = common.Budget(10.0), []
    for case in budget.over(range(100)):
        clock[0] += 3.0
        done.append(case)
    assert done == [0, 1, 2]


# The driver

@pytest.fixture
def driver():
    return script("benchmark")


def section(name, run):
    module = types.ModuleType(f"bench.{name}")
    module.run = run
    return module


def test_sections_are_found_in_the_reports_order(driver):
    found = driver.sections()
    assert "common" not in found and found == [name for name in driver.ORDER if name in found]
    for name in found:
        assert callable(importlib.import_module(f"bench.{name}").run)


def test_a_section_hears_of_peers_only_if_it_takes_them(driver, monkeypatch):
    good = {"section": "odd", "case": "c", "who": "kdagen", "how": "graph", "us": 1.0}
    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", lambda budget_s: [good]))
    assert driver.run_section("odd", 1.0, ("fla",)) == [good]
    heard = []
    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", lambda budget_s, *, peers=(): heard.append(peers) or []))
    driver.run_section("odd", 1.0, ("fla",))
    assert heard == [("fla",)]


@pytest.mark.parametrize("bad", [
    {}, {"section": "odd", "case": "c", "who": "w"}, {"section": "other", "case": "c", "who": "w", "us": 1, "how": "graph"},
])
def test_odd_rows_are_refused(driver, monkeypatch, bad):
    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", lambda budget_s: [bad]))
    with pytest.raises(ValueError, match="section odd"):
        driver.run_section("odd", 1.0, ())


def test_the_result_is_json_with_its_environment(driver, tmp_path):
    path = driver.write(tmp_path, "h200", "decode", {"gpu": "x"}, [{"a": 1}])
    assert path.name == "h200-decode.json"
    assert json.loads(path.read_text()) == {"section": "decode", "environment": {"gpu": "x"}, "rows": [{"a": 1}]}


# Figures and tables

ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6.0", "day": "2026-12-01", "copy_tb_s": 4.0,
               "matmul_tflop_s": 700.0, "peers": {"fla": "0.6.0"}}


def rows_of(section_name="decode"):
    rows = []
    for heads in (12, 32):
        for seqs in (1, 8, 64):
            for who, factor in (("fla", 1.5), ("kdagen", 1.0)):
                us, size = 2.0 + seqs * heads / 100 * factor, seqs * heads * 1e5
                rows.append({"section": section_name, "case": f"N={seqs} H={heads}", "who": who, "how": "graph", "us": us,
                             "p20": us * 0.99, "p80": us * 1.01, "samples": 9, "op": "recurrent", "seqs": seqs,
                             "heads": heads, "bytes": size, "floor_us": size / 4e6, "share": size / 4e6 / us,
                             "tb_s": size / us * 1e-6, "err": 1.5e-3})
    rows.append({"section": section_name, "case": "N=1 H=96", "who": "flashkda", "skipped": "no such op"})
    return {"section": section_name, "environment": ENVIRONMENT, "rows": rows}


@pytest.fixture
def plot():
    return script("plot")


def test_a_table_has_every_case_once_and_its_environment(plot):
    lines = plot.table(rows_of()).splitlines()
    assert lines[0] == "| case | time | kdagen, us | fla, us | floor, us | share | over fla | error |"
    body = [line for line in lines[2:] if line.startswith("|")]
    assert len(body) == 6 and body[0].startswith("| N=1 H=12, recurrent | graph | 2.12 (2.10-2.14) | 2.18 (2.16-2.20) |")
    assert body[0].count("|") == lines[0].count("|") and " 1.03x " in body[0]
    text = "\n".join(lines)
    assert "4.00 TB/s" in text and "fla 0.6.0" in text and "N=1 H=96 (flashkda): no such op" in text


def test_yardsticks_stand_under_the_table_and_the_last_row_counts(plot):
    data = rows_of()
    again = data["rows"][1] | {"us": 99.0, "p20": 98.0, "p80": 100.0}
    data["rows"] += [again, {"section": "decode", "case": "yardstick", "who": "torch.empty", "how": "host", "us": 2.3,
                             "p20": 2.2, "p80": 2.4, "samples": 3}]
    lines = plot.table(data).splitlines()
    assert "torch.empty" not in lines[0] and "For comparison: torch.empty 2.30 us (yardstick, host)." in lines
    assert lines[2].startswith("| N=1 H=12, recurrent | graph | 99.0 (98.0-100) |")


def test_figures_show_only_the_rows_they_are_about(plot):
    data = rows_of()
    drafts = [row | {"drafts": 3, "us": 1e6} for row in data["rows"] if "us" in row]
    data["rows"] = [row | {"drafts": 0} if "us" in row else row for row in data["rows"]] + drafts
    figure = next(one for one in plot.FIGURES if one.name == "decode-time")
    shown = [row["us"] for lines in plot.panels(figure, data["rows"]).values() for line in lines.values() for _, row in line]
    assert shown and max(shown) < 1e6


def test_tables_go_between_markers_and_nowhere_else(plot):
    text = ("a\n<!-- benchmark:decode -->\nold | 99 us\n<!-- /benchmark:decode -->\n"
            "b\n<!-- benchmark:conv -->c<!-- /benchmark:conv -->")
    new = plot.with_tables(text, {"decode": rows_of()})
    assert new.startswith("a\n<!-- benchmark:decode -->\n| case") and "old" not in new
    assert new.endswith("b\n<!-- benchmark:conv -->c<!-- /benchmark:conv -->"), "a section without JSON is left alone"
    assert plot.with_tables(new, {"decode": rows_of()}) == new


def test_panels_hold_lines_and_not_single_points(plot):
    data = rows_of()
    data["rows"].append(data["rows"][0] | {"heads": 64})
    figure = next(one for one in plot.FIGURES if one.name == "decode-bandwidth")
    shown = plot.panels(figure, data["rows"])
    assert list(shown) == [("recurrent", 12), ("recurrent", 32)]
    assert [x for x, _ in shown[("recurrent", 32)]["fla"]] == [1, 8, 64]


def test_figures_are_drawn_from_the_json(plot, tmp_path):
    pytest.importorskip("matplotlib")
    data = rows_of()
    for figure in (one for one in plot.FIGURES if one.section == "decode"):
        assert plot.draw(figure, data, tmp_path / f"{figure.name}.png")
    assert plot.draw_speedup("decode", data, tmp_path / "speedup.png")
    again = tmp_path / "again.png"
    plot.draw_speedup("decode", data, again)
    assert again.read_bytes() == (tmp_path / "speedup.png").read_bytes(), "the same rows give the same bytes"
    alone = data | {"rows": [row for row in data["rows"] if row["who"] == "kdagen"]}
    assert not plot.draw_speedup("decode", alone, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_newest_file_of_a_section_counts(plot, tmp_path):
    old, new = rows_of(), rows_of()
    old["environment"] = ENVIRONMENT | {"day": "2026-01-01", "gpu": "old"}
    (tmp_path / "z-decode.json").write_text(json.dumps(old))
    (tmp_path / "a-decode.json").write_text(json.dumps(new))
    assert plot.read(tmp_path)["decode"]["environment"]["gpu"] == "NVIDIA H200"


def test_the_documents_say_what_the_committed_json_says(plot):
    sections = plot.read(plot.FOLDER)
    for document in plot.DOCUMENTS:
        if document.exists():
            assert plot.with_tables(document.read_text(), sections) == document.read_text(), "run: python scripts/plot.py"
    shown = (plot.ROOT / "docs" / "benchmarks.md").read_text()
    for name in sections:
        assert f"<!-- benchmark:{name} -->" in shown, "a measured section has its table"
