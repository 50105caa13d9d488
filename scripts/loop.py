#!/usr/bin/env python
"""The continuous-batching loop, every request against the fp64 reference run alone: JSON, and the table of README.

    python scripts/loop.py            # runs the loop on the GPU or CPU, writes docs/loop/<cuda or cpu>.json and the table
    python scripts/loop.py --table    # the table from the JSON alone
    python scripts/loop.py --check    # writes nothing: what differs, and exit 1 if anything does
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))

from documents import marked, put

ROOT = Path(__file__).parent.parent
README, FOLDER = ROOT / "README.md", ROOT / "docs" / "loop"
COLUMNS = ("request", "prompt", "generated", "chunks", "drafted", "kept")


def measure(seed: int) -> dict:
    """{"section", "environment", "rows"}: a row a request, the last of all together; each agrees or this raises."""
    import torch

    from kdagen.serving.loop import run_demo

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = run_demo(device=device, seed=seed)
    if not all(row["agrees"] for row in rows):
        raise SystemExit(f"loop: requests differ from the reference: {[row for row in rows if not row['agrees']]}")
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU path, {platform.machine()}"
    environment = {"where": where, "device": device, "torch": torch.__version__, "seed": seed}
    return {"section": "loop", "environment": environment, "rows": rows}


def table(data: dict) -> str:
    lines = [[*(str(row[name]) for name in COLUMNS), f"{row['error']:.1e}"] for row in data["rows"]]
    env = data["environment"]
    return "\n".join([f"| {' | '.join((*COLUMNS, 'error'))} |", f"|---|{'---:|' * len(COLUMNS)}",
                      *(f"| {' | '.join(line)} |" for line in lines), "",
                      f"{env['where']}, torch {env['torch']}, seed {env['seed']}."])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--table", "only_table", is_flag=True, help="write the table from the JSON, run nothing")
@click.option("--check", is_flag=True, help="write nothing; print what differs, exit 1 if anything does")
@click.option("--seed", type=int, default=0, show_default=True)
def main(only_table, check, seed):
    """Run the loop, or draw its table. A GPU's file is shown where there is one, else the CPU's."""
    if not (only_table or check):
        from kdagen import files

        data = measure(seed)
        path = FOLDER / f"{data['environment']['device']}.json"
        changed = files.write_if_different(path, json.dumps(data, indent=1) + "\n")
        click.echo(f"{'wrote' if changed else 'unchanged:'} {path}")
    data = json.loads(sorted(FOLDER.glob("*.json"))[-1].read_text())
    differs = put(README, marked(README.read_text(), "loop", table(data)), check=check,
                  command="python scripts/loop.py --table")
    sys.exit(check and differs)


if __name__ == "__main__":
    main()
