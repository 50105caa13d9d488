"""The benchmark's driver, its rows, and the figures and tables made of them; no GPU."""

import importlib.util
import json
import re
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple

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
    made = common.row("decode", "N=1", "op", "kdagen", timing.Timing(10.0, 9.0, 11.0, 5), how="graph", bytes_moved=20e6,
                      operations=1e9, error=1e-3, error_against="fp64", seqs=1, heads=32)
    assert list(made)[:7] == ["section", "case", "op", "implementation", "how", "us", "p20"]
    assert (made["op"], made["implementation"], made["error"], made["error_against"]) == ("op", "kdagen", 1e-3, "fp64")
    assert made["floor_us"] == pytest.approx(5.0) and made["share"] == pytest.approx(0.5)
    assert made["tb_s"] == pytest.approx(2.0) and made["heads"] == 32
    bound = common.row("p", "c", "o", "i", timing.Timing(10.0, 9, 11, 5), how="graph", bytes_moved=4e6, operations=3.5e9)
    assert bound["floor_us"] == pytest.approx(5.0), "the larger of bytes and operations"
    with pytest.raises(ValueError, match="'graph', 'graph, alone', 'eager', 'host'"):
        common.row("p", "c", "o", "i", timing.Timing(1, 1, 1, 1), how="fast")


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


def test_a_limit_stops_what_lasts_too_long(common):
    began = time.monotonic()
    with pytest.raises(common.TooLong, match="first result"), common.limit(0.05):
        time.sleep(5)
    with common.limit(5.0):
        pass
    with common.limit(float("inf")):
        time.sleep(0.01)
    assert time.monotonic() - began < 2.0


# Ours alone, then beside the peers

class Case(NamedTuple):
    name: str

    op = "op"


CASES = (Case("a"), Case("b"))


def passes(common, monkeypatch, measure, *, peers=("one", "two"), **options):
    """(rows, what was kept on the way, and asked of ``measure``)"""
    module = importlib.import_module("bench._passes")
    monkeypatch.setattr(module, "peer", lambda who: None if who == "absent" else who)
    kept, asked = [], []

    def note(case, who, seconds):
        asked.append((case.name, who))
        return measure(case, who)

    rows = module.alone_then_beside("s", CASES, peers, note, budget=options.pop("budget", None) or common.Budget(100.0),
                                    keep=lambda rows: kept.append(list(rows)), **options)
    assert all({"section", "case", "op", "implementation"} <= row.keys() and ("us" in row or "skipped" in row)
               for row in rows)
    return rows, kept, asked


def timed_row(case, who, us, how="graph"):
    return {"section": "s", "case": case.name, "op": case.op, "implementation": who, "how": how, "us": us}


def times(rows):
    return {(row["case"], row["implementation"], row["how"]): row["us"] for row in rows if "us" in row}


def test_ours_alone_first_then_beside_ever_more_peers(common, monkeypatch):
    def measure(case, peers):
        return [timed_row(case, "kdagen", 1.0, "host"),
                *(timed_row(case, who, 10.0 + len(peers)) for who in ("kdagen", *peers))]

    rows, kept, asked = passes(common, monkeypatch, measure, peers=("one", "two", "absent"))
    assert asked == [(case, peers) for peers in ((), ("one",), ("one", "two")) for case in "ab"]
    assert times(rows) == {(case, *key): us for case in "ab" for key, us in {
        ("kdagen", "graph"): 12.0, ("kdagen", "host"): 1.0, ("kdagen", "graph, alone"): 10.0, ("one", "graph"): 12.0,
        ("two", "graph"): 12.0}.items()}
    notes = {row.get("note") for row in rows if row["implementation"] == "kdagen" and row.get("how") == "graph"}
    assert notes == {"replays in turn with one and two"}
    assert [row["skipped"] for row in rows if row["implementation"] == "absent"] == ["not installed"]
    assert len(kept) == 6 and [len(times(rows)) for rows in kept[:2]] == [2, 4], "all of ours are kept before any peer runs"


def test_a_peer_costs_its_own_rows_alone(common, monkeypatch):
    def measure(case, peers):
        if "two" in peers and case.name == "a":
            raise RuntimeError("an illegal memory access")
        skipped = [common.skipped("s", case.name, case.op, "one", "wrong: 0.3")] if "one" in peers else []
        return [timed_row(case, who, 10.0 + len(peers)) for who in ("kdagen", *peers) if who != "one"] + skipped

    rows, _, _ = passes(common, monkeypatch, measure)
    assert times(rows) == {("a", "kdagen", "graph"): 11.0, ("b", "kdagen", "graph"): 12.0, ("b", "two", "graph"): 12.0,
                           ("b", "kdagen", "graph, alone"): 10.0}
    why = {(row["case"], row["implementation"]): row["skipped"] for row in rows if "skipped" in row}
    assert why == {("a", "one"): "wrong: 0.3", ("b", "one"): "wrong: 0.3",
                   ("a", "two"): "RuntimeError: an illegal memory access"}


def test_ours_that_fail_are_an_error(common, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        passes(common, monkeypatch, lambda case, peers: 1 / 0)


def test_the_budget_keeps_the_last_complete_rows(common, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: clock[0])

    def measure(case, peers):
        clock[0] += 2.0
        return [timed_row(case, who, 10.0 + len(peers)) for who in ("kdagen", *peers)]

    rows, _, asked = passes(common, monkeypatch, measure, budget=common.Budget(5.5),
                            lacks=lambda case, who: "has no b" if (case.name, who) == ("b", "one") else None)
    assert asked == [("a", ()), ("b", ()), ("a", ("one",))]
    why = {(row["case"], row["implementation"]): row["skipped"] for row in rows if "skipped" in row}
    assert why == {("a", "two"): "no time left", ("b", "one"): "has no b", ("b", "two"): "no time left"}
    assert times(rows)["a", "kdagen", "graph"] == 11.0 and times(rows)["b", "kdagen", "graph"] == 10.0


def test_a_peer_that_cannot_be_captured_is_left_out(monkeypatch):
    module = importlib.import_module("bench._passes")

    class Lap:
        @classmethod
        def of(cls, calls):
            if calls == "bad":
                raise RuntimeError("operation not permitted when stream is capturing")
            return calls

    monkeypatch.setattr(module, "Lap", Lap)
    monkeypatch.setattr(module, "race", lambda laps, budget_ms: [f"time of {lap}" for lap in laps])
    found, failed = module.in_turn({"kdagen": "ours", "fla": "bad", "flashkda": "good"})
    assert found == {"kdagen": "time of ours", "flashkda": "time of good"} and "not permitted" in failed["fla"]
    with pytest.raises(RuntimeError):
        module.in_turn({"kdagen": "bad"})


# The driver

GOOD = {"section": "odd", "case": "c", "op": "o", "implementation": "kdagen", "how": "graph", "us": 1.0}


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
    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", lambda budget_s: [GOOD]))
    assert driver.run_section("odd", 1.0, ("fla",)) == [GOOD]
    heard = []
    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", lambda budget_s, *, peers=(): heard.append(peers) or []))
    driver.run_section("odd", 1.0, ("fla",))
    assert heard == [("fla",)]


def test_rows_are_kept_on_the_way(driver, monkeypatch, tmp_path):
    def run(budget_s, *, keep):
        keep([GOOD])
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "bench.odd", section("odd", run))
    with pytest.raises(KeyboardInterrupt):
        driver.run_section("odd", 1.0, (), lambda rows: driver.write(tmp_path, "h200", "odd", {}, rows))
    assert json.loads((tmp_path / "h200-odd.json").read_text())["rows"] == [GOOD]


@pytest.mark.parametrize("bad", [
    {}, GOOD | {"section": "other"}, *({key: GOOD[key] for key in GOOD if key != lacking} for lacking in GOOD),
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
                rows.append({"section": section_name, "case": f"N={seqs} H={heads}", "op": "recurrent",
                             "implementation": who, "how": "graph", "us": us, "p20": us * 0.99, "p80": us * 1.01,
                             "samples": 9, "seqs": seqs, "heads": heads, "bytes": size, "floor_us": size / 4e6,
                             "share": size / 4e6 / us, "tb_s": size / us * 1e-6, "error": 1.5e-3})
    rows.append({"section": section_name, "case": "N=1 H=96", "op": "recurrent", "implementation": "flashkda",
                 "skipped": "no such op"})
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
    assert "4.00 TB/s" in text and "fla 0.6.0" in text and "Not measured: flashkda, N=1 H=96: no such op." in text


def test_time_alone_has_its_own_column(plot):
    data = rows_of()
    ours = next(row for row in data["rows"] if row["implementation"] == "kdagen" and row["case"] == "N=8 H=32")
    data["rows"].append(ours | {"how": plot.ALONE, "us": 3.21})
    lines = plot.table(data).splitlines()
    assert lines[0].startswith("| case | time | kdagen, us | fla, us | kdagen alone, us | floor, us |")
    cells = {line.split(" | ")[0]: line.split(" | ")[4] for line in lines[2:] if line.startswith("|")}
    assert cells["| N=8 H=32, recurrent"] == "3.21" and cells["| N=1 H=12, recurrent"] == ""
    assert len(lines[0].split("|")) == len(lines[2].split("|"))


def test_targets_are_judged_beside_the_peers():
    targets = script("targets")
    beside, alone, target = {"us": 11.0, "share": 0.5}, {"us": 9.0, "share": 0.6}, {"at_most": 10}
    assert targets.stands(target, beside, alone, None) == ("at most 10 us", "**missed**, met alone")
    assert targets.stands(target, alone, None, None) == ("at most 10 us", "met")
    assert targets.stands(target, beside, beside, None) == ("at most 10 us", "**missed**")
    assert targets.stands({"ratio_at_most": 0.6}, alone, None, {"us": 10.0})[1] == "**missed** (0.90x)"
    assert targets.stands(target, None, None, None)[1] == "not measured" and targets.stands({}, beside, None, None)[1] == ""


def test_yardsticks_stand_under_the_table_and_the_last_row_counts(plot):
    data = rows_of()
    again = data["rows"][1] | {"us": 99.0, "p20": 98.0, "p80": 100.0}
    data["rows"] += [again, {"section": "decode", "case": "yardstick", "op": "torch.empty", "implementation": "torch.empty",
                             "how": "host", "us": 2.3, "p20": 2.2, "p80": 2.4, "samples": 3}]
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


def test_figures_are_shown_where_they_have_rows(plot):
    text = "<!-- figures:decode -->\n![old](x.png)\n<!-- /figures:decode -->\n<!-- figures:conv --><!-- /figures:conv -->"
    shown = plot.with_tables(text, {"decode": rows_of()}).splitlines()
    assert shown[1:-2] == [
        "![decode: graph time against sequences in the batch](benchmarks/decode-time.png)",
        "![decode: bandwidth against sequences in the batch](benchmarks/decode-bandwidth.png)",
        "![decode: speed-up over each peer](benchmarks/decode-speedup.png)"]
    assert shown[-1] == "<!-- figures:conv --><!-- /figures:conv -->"
    ours = [row for row in rows_of()["rows"] if row["implementation"] == "kdagen"]
    alone = rows_of() | {"rows": [row for row in ours if row["seqs"] == 1]}
    assert plot.images("decode", alone) == "", "single points make no figure"


def test_every_shown_figure_is_there(plot):
    shown = re.findall(r"!\[.*?\]\((\S+)\)", (plot.ROOT / "docs" / "benchmarks.md").read_text())
    assert shown and all((plot.ROOT / "docs" / path).exists() for path in shown)


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
    alone = data | {"rows": [row for row in data["rows"] if row["implementation"] == "kdagen"]}
    assert not plot.draw_speedup("decode", alone, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_newest_file_of_a_section_counts(plot, tmp_path):
    old, new = rows_of(), rows_of()
    old["environment"] = ENVIRONMENT | {"day": "2026-01-01", "gpu": "old"}
    (tmp_path / "z-decode.json").write_text(json.dumps(old))
    (tmp_path / "a-decode.json").write_text(json.dumps(new))
    assert plot.read(tmp_path)["decode"]["environment"]["gpu"] == "NVIDIA H200"


def test_committed_rows_name_their_op_and_implementation(plot):
    for path in plot.FOLDER.glob("*.json"):
        for row in json.loads(path.read_text())["rows"]:
            assert {"section", "case", "op", "implementation"} <= row.keys(), f"{path.name}: {row}"
            assert not {"who", "err", "err_against", "state_err"} & row.keys(), f"{path.name}: {row}"


def test_the_documents_say_what_the_committed_json_says(plot):
    sections = plot.read(plot.FOLDER)
    for document in plot.DOCUMENTS:
        if document.exists():
            assert plot.with_tables(document.read_text(), sections) == document.read_text(), "run: python scripts/plot.py"
    shown = (plot.ROOT / "docs" / "benchmarks.md").read_text()
    for name in sections:
        assert f"<!-- benchmark:{name} -->" in shown, "a measured section has its table"
