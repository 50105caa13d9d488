#!/usr/bin/env python
"""Relative errors of the ops against fp64 on this machine's GPU, by class of input: JSON, and the table of docs/limits.md.

    python scripts/accuracy.py             # needs a GPU: measures, writes docs/benchmarks/<device>-accuracy.json
    python scripts/accuracy.py --table     # writes the table between the markers of docs/limits.md, no GPU needed
    python scripts/accuracy.py --check     # exit 1 if the table is not what the JSON says

The oracle is the chunk form in fp64 (which tests hold to the recurrence, token by token) of the same rounded inputs.
fla-core, where it is installed, gets the same inputs; its ready-gate path needs a gate of at least -5 a token, so other
classes have no figure of it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "limits.md"
FOLDER = ROOT / "docs" / "benchmarks"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

CLASSES = {
    "bounded": "raw gate, bounded form", "softplus": "raw gate, softplus form", "rand": "random log decay",
    "slow": "slow decay, about -1e-4", "zero": "no decay", "bound": "-5 on every token", "mask": "tokens at -1000",
    "mixed": "a mixture, token by token", "equal": "nearly equal keys, beta 0.993, slow decay",
}
EVERY_DTYPE = ("bounded", "rand", "equal")  # the other classes in bf16 alone
LENGTHS = (70, 0, 331, 9, 64, 1026)
HEADS, K, V = 4, 128, 128


def measure(seed: int = 0) -> dict:
    """{"section", "environment", "conditions", "rows"}: a row an op, class, dtype and implementation."""
    import torch
    from bench.common import environment

    from inputs import cu_seqlens, kda, relative
    from kdagen import reference
    from kdagen.ops.decode import fused_recurrent_kda
    from kdagen.ops.prefill import chunk_kda

    rng, rows = torch.Generator().manual_seed(seed), []
    edges = cu_seqlens(list(LENGTHS))
    for name in CLASSES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if name in EVERY_DTYPE else (torch.bfloat16,):
            tensors, options = kda(rng, name, T=sum(LENGTHS), sequences=len(LENGTHS), H=HEADS, K=K, V=V, dtype=dtype)
            put = lambda values: {key: x.cuda() if torch.is_tensor(x) else x for key, x in values.items()}
            tensors, options = put(tensors), put(options)
            o, state = reference.chunk_kda(**tensors, **options, cu_seqlens=edges, output_final_state=True)
            calls = {
                ("chunk_kda", "kdagen"): lambda t=tensors, x=options: chunk_kda(
                    **t, **x, cu_seqlens=edges.cuda(), cu_seqlens_cpu=edges, output_final_state=True),
                ("fused_recurrent_kda", "kdagen"): lambda t=tensors, x=options: fused_recurrent_kda(
                    **t, **x, cu_seqlens=edges.cuda(), output_final_state=True),
            }
            if dtype == torch.bfloat16 and name not in ("mask", "mixed"):
                calls["chunk_kda", "fla"] = lambda t=tensors, x=options: fla(t, x, edges)
            for (op, who), call in calls.items():
                try:
                    ours = call()
                except Exception as error:  # a peer that cannot run a class has no row; ours must
                    if who == "kdagen":
                        raise
                    print(f"{who} {name}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
                    continue
                rows.append({"section": "accuracy", "op": op, "case": name, "who": who, "dtype": str(dtype)[6:],
                             "err": relative(ours[0], o), "state_err": relative(ours[1], state)})
                print("{op:20} {who:7} {dtype:9} {case:9} {err:.1e} {state_err:.1e}".format(**rows[-1]), flush=True)
    return {"section": "accuracy", "environment": environment(), "rows": rows,
            "conditions": {"lengths": LENGTHS, "heads": HEADS, "K": K, "V": V, "seed": seed, "oracle": "chunk form, fp64"}}


def fla(tensors: dict, options: dict, edges):
    """fla-core's chunk_kda on the same call; its states are [N, H, K, V]."""
    from fla.ops.kda import chunk_kda

    state = tensors["initial_state"].transpose(-1, -2).contiguous()
    flags = {name: options[name] for name in options if name in (
        "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "A_log", "dt_bias", "lower_bound")}
    if "dt_bias" in flags:
        flags["dt_bias"] = flags["dt_bias"].flatten()
    if "lower_bound" in flags:
        flags["safe_gate"] = True
    o, final = chunk_kda(**{**tensors, "initial_state": state}, **flags, cu_seqlens=edges.cuda().long(),
                         output_final_state=True)
    return o, final.transpose(-1, -2)


def table(data: dict) -> str:
    """The errors as a markdown table, output then state."""
    found = {(row["case"], row["op"], row["who"], row["dtype"]): row for row in data["rows"]}
    chunk, step = "chunk_kda", "fused_recurrent_kda"
    columns = [(chunk, "kdagen", "bfloat16"), (chunk, "fla", "bfloat16"), (chunk, "kdagen", "float16"),
               (chunk, "kdagen", "float32"), (step, "kdagen", "bfloat16"), (step, "kdagen", "float32")]
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    names = [f"{op}{' of fla' if who == 'fla' else ''}, {short[dtype]}" for op, who, dtype in columns]
    out = [f"| inputs | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for name, words in CLASSES.items():
        cells = [found.get((name, *column)) for column in columns]
        errors = [f"{cell['err']:.1e} / {cell['state_err']:.1e}" if cell else "" for cell in cells]
        out.append(f"| {words} | {' | '.join(errors)} |")
    env, at = data["environment"], data["conditions"]
    peers = ", ".join(f"{name} {version}" for name, version in env["peers"].items()) or "none"
    lengths = ", ".join(map(str, at["lengths"]))
    return "\n".join([
        *out, "", "Relative error of the output / of the final state against the chunk form in fp64; sequences of "
        f"{lengths} tokens, H = {at['heads']}, K = {at['K']}, V = {at['V']}; {env['gpu']}, torch {env['torch']}, Triton "
        f"{env['triton']}; peers: {peers}."])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--table", "only_table", is_flag=True, help="write the table from the JSON, measure nothing")
@click.option("--check", is_flag=True, help="exit 1 if the table is not what the JSON says")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, show_default=True)
def main(only_table, check, out):
    """Measure, or draw the table."""
    if not only_table and not check:
        from kdagen import devices, files

        data = measure()
        path = out / f"{devices.machine().slug}-accuracy.json"
        files.write_if_different(path, json.dumps(data, indent=1) + "\n")
        click.echo(table(data))
        click.echo(f"wrote {path}. Next: python scripts/accuracy.py --table")
        return
    data = json.loads(next(iter(sorted(FOLDER.glob("*-accuracy.json")))).read_text())
    text = DOCUMENT.read_text()
    block = f"<!-- accuracy -->\n{table(data)}\n<!-- /accuracy -->"
    made = re.sub(r"<!-- accuracy -->.*?<!-- /accuracy -->", lambda _: block, text, flags=re.S)
    if check:
        sys.exit(made != text)
    DOCUMENT.write_text(made)


if __name__ == "__main__":
    main()
