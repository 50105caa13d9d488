#!/usr/bin/env python
"""README's results: each target of scripts/targets.toml beside what docs/benchmarks/*.json measured, met or missed.

    python scripts/targets.py            # writes the table between the <!-- targets --> markers of README.md
    python scripts/targets.py --check    # writes nothing: what differs, and exit 1 if anything does
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))

from documents import marked, put
from plot import ALONE, FOLDER, ROOT, number, read

from kdagen.devices import tomllib

README = ROOT / "README.md"
TARGETS = Path(__file__).parent / "targets.toml"


def find(rows: list[dict], case: str, who: str, how: str) -> dict | None:
    """The last row of a case, by whom, timed how."""
    found = [row for row in rows if (row["case"], row["implementation"], row.get("how")) == (case, who, how)]
    return found[-1] if found else None


def judge(target: dict, row: dict | None, base: dict | None) -> tuple[str, bool | None]:
    """(what was wanted, whether it was met); None where nothing was wanted or nothing measured."""
    wants, met = [], []
    if "at_most" in target:
        wants.append(f"at most {target['at_most']:g} us")
        met.append(row and row["us"] <= target["at_most"])
    if "share_at_least" in target:
        wants.append(f"{target['share_at_least']:.0%} of copy")
        met.append(row and round(row["share"], 2) >= target["share_at_least"])
    if "ratio_at_most" in target:
        wants.append(f"at most {target['ratio_at_most']:g}x")
        met.append(row and base and row["us"] <= target["ratio_at_most"] * base["us"])
    return ", ".join(wants), all(met) if wants and row else None


def stands(target: dict, row: dict | None, alone: dict | None, base: dict | None) -> tuple[str, str]:
    """(what was wanted, the verdict): on the row beside the peers, where there were any, whatever ours took alone."""
    wanted, met = judge(target, row, base)
    verdict = {True: "met", False: "**missed**", None: "" if row else "not measured"}[met]
    if row and base and "ratio_at_most" in target:
        verdict += f" ({row['us'] / base['us']:.2f}x)"
    if alone and met is False and judge(target, alone, base)[1]:
        verdict += ", met alone"
    return wanted, verdict


def table(sections: dict[str, dict]) -> str:
    """The whole block: a table a group of targets, and the conditions."""
    out = []
    for section, groups in tomllib.loads(TARGETS.read_text()).items():
        data = sections.get(section)
        for group in groups:
            rows, how = data["rows"] if data else [], group["how"]
            others = group.get("peers", []) + ([group["of"]] if "of" in group else [])
            head = ["case", "target", "kdagen, us", "alone, us", "share of the floor", *(f"{who}, us" for who in others), ""]
            lines = []
            for target in group["rows"]:
                row = find(rows, target["case"], "kdagen", how)
                beside = [find(rows, target["case"], who, how) for who in others]
                base = find(rows, target.get("of_case", target["case"]), group.get("of", "kdagen"), how)
                alone = find(rows, target["case"], "kdagen", ALONE) if how == "graph" else None
                wanted, verdict = stands(target, row, alone, base)
                cells = [target["case"], wanted, number(row["us"]) if row else "", number(alone["us"]) if alone else "",
                         f"{row['share']:.0%}" if row and row.get("share", 0) >= 0.01 else "",
                         *(number(one["us"]) if one else "" for one in beside), verdict]
                lines.append(cells)
            keep = [i for i in range(len(head)) if i in (0, 2, len(head) - 1) or any(line[i] for line in lines)]
            out += [f"**{group['what'][0].upper()}{group['what'][1:]}**", "",
                    f"| {' | '.join(head[i] for i in keep)} |", "|---|" + "---:|" * (len(keep) - 2) + "---|",
                    *(f"| {' | '.join(line[i] for i in keep)} |" for line in lines), ""]
    env = next(iter(sections.values()))["environment"]
    timed = {row["implementation"] for data in sections.values() for row in data["rows"] if "us" in row}
    peers = ", ".join(f"{name} {version}" for name, version in env["peers"].items() if name in timed)
    turns = any(row.get("how") == ALONE for data in sections.values() for row in data["rows"])
    return "\n".join([
        *out, f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, {peers}, {env['day']}; in the same run a copy "
        f"moved {env['copy_tb_s']:.2f} TB/s. Medians of CUDA-graph replays on cold, random inputs, or of an eager call's "
        "host time." + " Beside a peer, replays took turns; *alone* they did not. Targets are judged beside it." * turns])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="write nothing; print what differs, exit 1 if anything does")
def main(check):
    """Write README's table of targets."""
    differs = put(README, marked(README.read_text(), "targets", table(read(FOLDER))), check=check,
                  command="python scripts/targets.py")
    sys.exit(check and differs)


if __name__ == "__main__":
    main()
