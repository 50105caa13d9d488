#!/usr/bin/env python
"""Draw the benchmark's figures from docs/benchmarks/*.json, and write its tables between markers in the documents.

    python scripts/plot.py           # figures and tables
    python scripts/plot.py --check   # writes nothing: what differs in the tables, and exit 1 if anything does

A table stands between ``<!-- benchmark:decode -->`` and ``<!-- /benchmark:decode -->``. The figures lie beside the JSON, and
are shown, where the JSON has rows for them, between ``<!-- figures:decode -->`` and ``<!-- /figures:decode -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click

sys.path.insert(0, str(Path(__file__).parent))

from documents import put

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLORS = {"kdagen": "#2563eb", "fla": "#ea580c", "flashkda": "#0d9488"}
ALONE = "graph, alone"  # of our rows: measured without the peers that the row "graph" took turns with
OTHERS = ("#7c3aed", "#a16207", "#be185d", "#4d7c0f")


class Figure(NamedTuple):
    """One picture: rows of a section, a line an implementation, a panel a value of ``panel``."""

    name: str
    section: str
    y: str               # us or tb_s
    x: str
    panel: tuple[str, ...]
    xlabel: str
    how: str = "graph"
    only: dict = {}      # field -> the value that a row must have, if it has the field at all


PLAIN = {"drafts": 0, "state": "float32"}
FIGURES = (
    Figure("prefill-time", "prefill", "us", "tokens", ("heads",), "tokens", only={"seqs": 1, "gate": "bounded"}),
    Figure("decode-time", "decode", "us", "seqs", ("op", "heads"), "sequences in the batch", only=PLAIN),
    Figure("decode-bandwidth", "decode", "tb_s", "seqs", ("op", "heads"), "sequences in the batch", only=PLAIN),
    Figure("conv-bandwidth", "conv", "tb_s", "tokens", ("op", "channels"), "tokens",
           only={"seqs": 1, "driver": "schedule"}),
    Figure("conv-update-bandwidth", "conv", "tb_s", "seqs", ("op", "channels"), "sequences in the batch",
           only=PLAIN | {"op": "causal_conv1d_update"}),
    Figure("metadata-host", "metadata", "us", "seqs", ("tables",), "sequences in the batch", "host"),
    Figure("layer-time", "layer", "us", "batch", ("heads",), "sequences in the batch"),
)
WORDS = {"heads": "H = {}", "channels": "{} channels", "op": "{}", "tables": "{}"}
SAY_OP = ("decode", "conv")  # sections whose cases are told with their op


def read(folder: Path) -> dict[str, dict]:
    """Section -> {environment, rows}, of the newest file where several devices have the section.

    Errors by class of input are no section of the benchmark: scripts/accuracy.py has their table.
    """
    found: dict[str, dict] = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if data["section"] == "accuracy":
            continue
        before = found.get(data["section"])
        if before is None or before["environment"]["day"] <= data["environment"]["day"]:
            found[data["section"]] = data
    return found


def timed(rows: Iterable[dict], how: str | None = None) -> list[dict]:
    return [row for row in rows if "us" in row and how in (None, row["how"])]


def in_order(names: Iterable[str]) -> list[str]:
    """kdagen first, then its peers, then whatever else, each once."""
    return sorted(dict.fromkeys(names), key=lambda who: ([*COLORS].index(who) if who in COLORS else len(COLORS), who))


def color(who: str, names: list[str]) -> str:
    rest = [name for name in names if name not in COLORS]
    return COLORS.get(who) or OTHERS[rest.index(who) % len(OTHERS)]


# Tables

def table(data: dict) -> str:
    """The section's markdown table, with the environment under it. Of several rows of one case the last counts.

    Where peers ran, our time in a graph stands beside theirs, measured in turn; what ours took alone has its own column.
    """
    lines: dict[tuple, dict[str, dict]] = defaultdict(dict)
    alone = {(row["case"], row["op"], "graph"): row for row in timed(data["rows"], ALONE)}
    for row in timed(data["rows"]):
        if row["how"] != ALONE:
            lines[(row["case"], row["op"], row["how"])][row["implementation"]] = row
    beside = {line: by for line, by in lines.items() if "kdagen" not in by}  # yardsticks: told under the table
    lines = {line: by for line, by in lines.items() if line not in beside}
    names, ours = in_order(who for by in lines.values() for who in by), "kdagen"
    by_itself = ["kdagen alone, us"] * bool(alone)
    head = ["case", "time", *(f"{who}, us" for who in names), *by_itself, "floor, us", "share",
            *(f"over {who}" for who in names[1:]), "error"]
    out = [f"| {' | '.join(head)} |", f"|{'---|' * 2}{'---:|' * (len(head) - 2)}"]
    for (case, op, how), by in lines.items():
        mine = by.get(ours)
        cells = [label_of(data["section"], case, op), how, *(spread(by[who]) if who in by else "" for who in names)]
        cells += [number(alone[case, op, how]["us"]) if (case, op, how) in alone else "" for _ in by_itself]
        cells += [number(mine["floor_us"]), f"{mine['share']:.0%}"] if mine and "floor_us" in mine else ["", ""]
        cells += [f"{by[who]['us'] / mine['us']:.2f}x" if mine and who in by else "" for who in names[1:]]
        cells.append(f"{mine['error']:.1e}" if mine and "error" in mine else "")
        out.append(f"| {' | '.join(cells)} |")
    env = data["environment"]
    peers = ", ".join(f"{name} {version}" for name, version in env["peers"].items()) or "none"
    out += ["", f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, {env['day']}; in the same run a copy moved "
            f"{env['copy_tb_s']:.2f} TB/s and a bf16 product ran at {env['matmul_tflop_s']:.0f} TFLOP/s; peers: {peers}. "
            "Medians, with the 20th and 80th percentile."]
    if beside:
        told = [f"{who} {number(row['us'])} us ({case}, {how})" for (case, _, how), by in beside.items()
                for who, row in by.items()]
        out += ["", f"For comparison: {', '.join(told)}."]
    skipped: dict[tuple, list[str]] = defaultdict(list)
    for row in data["rows"]:
        if "skipped" in row:
            skipped[row["implementation"], row["skipped"].split("\n")[0].rstrip(".")].append(row["case"])
    if skipped:
        told = [f"{who}, {', '.join(cases)}: {why}" for (who, why), cases in skipped.items()]
        out += ["", f"Not measured: {'; '.join(told)}."]
    return "\n".join(out)


def label_of(section: str, case: str, op: str) -> str:
    return f"{case}, {op}" if section in SAY_OP else case


def spread(row: dict) -> str:
    return f"{number(row['us'])} ({number(row['p20'])}-{number(row['p80'])})"


def number(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def with_tables(text: str, sections: dict[str, dict]) -> str:
    """The document with every marked table and list of figures replaced; those of a section without JSON are left alone."""
    def put(match: re.Match) -> str:
        what, name = match["what"], match["name"]
        if name not in sections:
            return match[0]
        made = table(sections[name]) if what == "benchmark" else images(name, sections[name])
        return f"<!-- {what}:{name} -->\n{made}\n<!-- /{what}:{name} -->"

    marked = r"<!-- (?P<what>benchmark|figures):(?P<name>\w+) -->.*?<!-- /(?P=what):(?P=name) -->"
    return re.sub(marked, put, text, flags=re.S)


def images(section: str, data: dict) -> str:
    """Lines that show the section's figures, as a document in docs/ names them."""
    told = {figure.name: f"{'bandwidth' if figure.y == 'tb_s' else figure.how + ' time'} against {figure.xlabel}"
            for figure in FIGURES if figure.section == section and panels(figure, data["rows"])}
    if len(compared(data)) > 1:
        told[f"{section}-speedup"] = "speed-up over each peer"
    return "\n".join(f"![{section}: {words}]({FOLDER.name}/{name}.png)" for name, words in told.items())


# Figures

def panels(figure: Figure, rows: list[dict]) -> dict[tuple, dict[str, list[tuple[float, dict]]]]:
    """Panel -> implementation -> [(x, row)] sorted; panels of one x are left out, of rows at the same x the last counts."""
    out: dict[tuple, dict] = defaultdict(lambda: defaultdict(dict))
    for row in timed(rows, figure.how):
        wanted = all(row.get(name, value) == value for name, value in figure.only.items())
        if wanted and figure.x in row and figure.y in row and any(part in row for part in figure.panel):
            out[tuple(row.get(part) for part in figure.panel)][row["implementation"]][row[figure.x]] = row
    lines = {key: {who: sorted(by.items()) for who, by in whos.items()} for key, whos in out.items()}
    return {key: lines[key] for key in sorted(lines, key=str_last) if any(len(line) > 1 for line in lines[key].values())}


def str_last(key: tuple) -> tuple:
    return tuple((isinstance(part, str), part if part is not None else -1) for part in key)


def title_of(figure: Figure, key: tuple) -> str:
    return ", ".join(WORDS[part].format(value) for part, value in zip(figure.panel, key) if value is not None)


def draw(figure: Figure, data: dict, path: Path) -> bool:
    """Draw one figure; False where the section has too few rows for it."""
    shown = panels(figure, data["rows"])
    if not shown:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = in_order(who for lines in shown.values() for who in lines)
    columns = min(3, len(shown))
    count = -(-len(shown) // columns)
    fig, axes = plt.subplots(count, columns, figsize=(max(7.0, 1.2 + 3.6 * columns), 0.9 + 2.7 * count), squeeze=False)
    for ax, (key, lines) in zip(axes.flat, shown.items()):
        for who in in_order(lines):
            x, y = zip(*((x, row[figure.y]) for x, row in lines[who]))
            low, high = zip(*(_spread(row, figure.y) for _, row in lines[who]))
            ax.plot(x, y, "o-", color=color(who, names), lw=2 if who == "kdagen" else 1.5, ms=4, label=who,
                    zorder=3 if who == "kdagen" else 2)
            ax.fill_between(x, low, high, color=color(who, names), alpha=0.15, lw=0)
        _reference(ax, figure, lines, data)
        ax.set_title(title_of(figure, key), loc="left", color=INK)
        _axes(ax, figure, {x for line in lines.values() for x, _ in line})
    for ax in list(axes.flat)[len(shown):]:
        ax.remove()
    _finish(fig, data, path, f"{figure.section}: {'bandwidth' if figure.y == 'tb_s' else figure.how + ' time'}")
    return True


def _spread(row: dict, y: str) -> tuple[float, float]:
    if y == "us":
        return row["p20"], row["p80"]
    return row["bytes"] / row["p80"] * 1e-6, row["bytes"] / row["p20"] * 1e-6


def _reference(ax, figure: Figure, lines: dict, data: dict) -> None:
    """The floor (times) or the copy's bandwidth (bandwidths), dashed."""
    if figure.y == "tb_s":
        ceiling = data["environment"]["copy_tb_s"]
        ax.axhline(ceiling, color=MUTED, lw=1.2, ls="--", label=f"copy, {ceiling:.2f} TB/s")
        ax.set_ylim(0, ceiling * 1.1)
        return
    floor = {x: row["floor_us"] for line in lines.values() for x, row in line if "floor_us" in row}
    if len(floor) > 1:
        ax.plot(*zip(*sorted(floor.items())), color=MUTED, lw=1.2, ls="--", label="floor")


def _axes(ax, figure: Figure, ticks: set) -> None:
    ax.set_xscale("log", base=2)
    ticks = sorted(ticks)
    ax.set_xticks(ticks if len(ticks) <= 7 else ticks[:: -(-len(ticks) // 7)])
    ax.xaxis.set_major_formatter(lambda value, _: _short(value))
    ax.minorticks_off()
    ax.set_xlabel(figure.xlabel, color=MUTED)
    if figure.y == "us":
        values = [y for line in ax.get_lines() for y in line.get_ydata()]
        if max(values) > 30 * min(values):  # else a scale from zero shows more
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.yaxis.set_minor_formatter(lambda value, _: "")
        else:
            ax.set_ylim(0, None)
        ax.set_ylabel("us", color=MUTED)
    else:
        ax.set_ylabel("TB/s", color=MUTED)
    ax.grid(True, color=GRID, lw=0.7)
    ax.tick_params(which="both", colors=MUTED, length=0)
    for side in ax.spines.values():
        side.set_color(GRID)


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def compared(data: dict) -> dict[str, dict[str, dict]]:
    """case -> implementation -> graph row, of the cases in which a peer was timed beside ours."""
    cases = defaultdict(dict)
    for row in timed(data["rows"], "graph"):
        cases[label_of(data["section"], row["case"], row["op"])][row["implementation"]] = row
    return {case: by for case, by in cases.items() if "kdagen" in by and len(by.keys() & COLORS.keys()) > 1}


def draw_speedup(section: str, data: dict, path: Path) -> bool:
    """Peer's time over ours, a dot a case and peer; False where peers were measured in less than two cases."""
    cases = compared(data)
    if len(cases) < 2:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [who for who in in_order(who for by in cases.values() for who in by) if who != "kdagen" and who in COLORS]
    fig, ax = plt.subplots(figsize=(8.4, 1.4 + 0.3 * len(cases)))
    labels = list(cases)[::-1]
    for who in names:
        points = [(cases[case][who]["us"] / cases[case]["kdagen"]["us"], y) for y, case in enumerate(labels)
                  if who in cases[case]]
        ax.plot(*zip(*points), "o", color=COLORS[who], ms=6, label=f"over {who}")
        for ratio, y in points:
            others = [by["us"] for name, by in cases[labels[y]].items() if name in names and name != who]
            left = any(ratio * cases[labels[y]]["kdagen"]["us"] < us for us in others)  # the figures of near dots stay apart
            ax.annotate(f"{ratio:.2f}", (ratio, y), xytext=(-6 if left else 6, -3), ha="right" if left else "left",
                        textcoords="offset points", color=MUTED, fontsize=7)
    ax.axvline(1.0, color=INK, lw=1)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlim(0, None)
    ax.margins(x=0.12)
    ax.set_xlabel("times faster than the peer (right of 1: faster)", color=MUTED)
    ax.grid(True, axis="x", color=GRID, lw=0.7)
    ax.tick_params(colors=MUTED, length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    _finish(fig, data, path, f"{section}: speed-up, graph time")
    return True


def _finish(fig, data: dict, path: Path, title: str) -> None:
    import matplotlib.pyplot as plt

    handles = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    height = fig.get_size_inches()[1]
    labels = sorted(handles, key=lambda label: label.startswith(("floor", "copy")))  # the lines' own names first
    title = fig.suptitle(f"{title}, {data['environment']['gpu']}", x=0.01, y=1 - 0.08 / height, ha="left", va="top",
                         color=INK, fontsize=11)
    legend = fig.legend([handles[label] for label in labels], labels, loc="upper right", ncols=len(labels), frameon=False,
                        fontsize=8, bbox_to_anchor=(1.0, 1 - 0.02 / height))
    title.set_in_layout(False)
    legend.set_in_layout(False)
    fig.tight_layout(rect=(0, 0, 1, 1 - 0.34 / height))
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=140, metadata={"Software": None})
    plt.close(fig)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--in", "folder", type=click.Path(file_okay=False, path_type=Path), default=FOLDER, help="docs/benchmarks")
@click.option("--document", "documents", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="README.md and docs/benchmarks.md by default")
@click.option("--check", is_flag=True, help="write nothing; print what differs in the tables, exit 1 if anything does")
def main(folder, documents, check):
    """Draw the benchmark's figures from docs/benchmarks/*.json, and write its tables into the documents."""
    sections = read(folder)
    if not sections:
        raise SystemExit(f"plot: no JSON in {folder}. Run: python scripts/benchmark.py")
    differs = [put(document, with_tables(document.read_text(), sections), check=check, command="python scripts/plot.py")
               for document in documents or DOCUMENTS]
    if check:
        sys.exit(any(differs))
    made = [(figure.name, draw(figure, sections[figure.section], folder / f"{figure.name}.png"))
            for figure in FIGURES if figure.section in sections]
    made += [(f"{name}-speedup", draw_speedup(name, data, folder / f"{name}-speedup.png"))
             for name, data in sections.items()]
    for name, drawn in made:
        click.echo(f"{'drew' if drawn else 'too few rows for'} {name}.png")


if __name__ == "__main__":
    main()
