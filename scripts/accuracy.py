#!/usr/bin/env python
"""Relative errors of the ops against fp64 on this machine's GPU, by class of input: JSON, and the table of docs/limits.md.

    python scripts/accuracy.py             # needs a GPU: measures, writes docs/benchmarks/<device>-accuracy.json
    python scripts/accuracy.py --table     # writes the table between the markers of docs/limits.md, no GPU needed
    python scripts/accuracy.py --check     # writes nothing: what differs, and exit 1 if anything does

The oracle is the chunk form in fp64 (which tests hold to the recurrence, token by token) of the same rounded inputs. Ours
come first; then fla-core, where it is installed, gets the same inputs, class after class while the budget lasts, as it may
compile and tune for minutes. The JSON is rewritten after each row. fla-core's ready-gate path needs a gate of at least -5 a
token, so other classes have no figure of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "limits.md"
FOLDER = ROOT / "docs" / "benchmarks"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from documents import marked, put  # noqa: E402

CLASSES = {
    "bounded": "raw gate, bounded form", "softplus": "raw gate, softplus form", "rand": "random log decay",
    "slow": "slow decay, about -1e-4", "zero": "no decay", "bound": "-5 on every token", "mask": "tokens at -1000",
    "mixed": "a mixture, token by token", "equal": "nearly equal keys, beta 0.993, slow decay",
}
EVERY_DTYPE = ("bounded", "rand", "equal")  # the other classes in bf16 alone
LENGTHS = (70, 0, 331, 9, 64, 1026)
LIVE = [n for n, length in enumerate(LENGTHS) if length]  # an empty one keeps its state, which would hide the others' error
HEADS, K, V = 4, 128, 128


def inputs_of(seed: int) -> Iterator[tuple]:
    """(class, dtype, tensors, options, fp64 output, fp64 final state), everything on the GPU; the same for the same seed."""
    import torch

    from inputs import kda
    from kdagen import reference

    rng = torch.Generator().manual_seed(seed)
    for name in CLASSES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if name in EVERY_DTYPE else (torch.bfloat16,):
            tensors, options = kda(rng, name, T=sum(LENGTHS), sequences=len(LENGTHS), H=HEADS, K=K, V=V, dtype=dtype)
            tensors, options = ({key: x.cuda() if torch.is_tensor(x) else x for key, x in values.items()}
                                for values in (tensors, options))
            yield name, dtype, tensors, options, *reference.chunk_kda(
                **tensors, **options, cu_seqlens=edges(), output_final_state=True)


def edges():
    """The sequences' boundaries, on the CPU."""
    from inputs import cu_seqlens

    return cu_seqlens(list(LENGTHS))


def measure(budget_s: float, keep: Callable[[dict], None], seed: int = 0) -> dict:
    """{"section", "environment", "conditions", "rows"}: a row an op, class, dtype and implementation, ours first.

    ``keep`` is told of it after every row. The budget (seconds) ends the peer's rows, never ours.
    """
    from bench.common import Budget, environment, limit, peer

    from inputs import relative
    from kdagen.ops.decode import fused_recurrent_kda
    from kdagen.ops.prefill import chunk_kda

    budget, bounds = Budget(budget_s), edges()
    data = {"section": "accuracy", "environment": environment(), "rows": [],
            "conditions": {"lengths": LENGTHS, "heads": HEADS, "K": K, "V": V, "seed": seed, "oracle": "chunk form, fp64"}}

    def note(op: str, implementation: str, name: str, dtype, found: tuple, o, state) -> None:
        data["rows"].append({"section": "accuracy", "op": op, "case": name, "implementation": implementation,
                             "dtype": str(dtype)[6:], "error": relative(found[0], o),
                             "state_error": relative(found[1][LIVE], state[LIVE])})
        told = "{op:20} {implementation:7} {dtype:9} {case:9} {error:.1e} {state_error:.1e}"
        print(told.format(**data["rows"][-1]), flush=True)
        keep(data)

    for name, dtype, tensors, options, o, state in inputs_of(seed):
        options = options | {"cu_seqlens": bounds.cuda(), "output_final_state": True}
        note("chunk_kda", "kdagen", name, dtype, chunk_kda(**tensors, **options, cu_seqlens_cpu=bounds), o, state)
        note("fused_recurrent_kda", "kdagen", name, dtype, fused_recurrent_kda(**tensors, **options), o, state)
    for name, dtype, tensors, options, o, state in inputs_of(seed) if peer("fla") else ():
        if str(dtype) != "torch.bfloat16" or name in ("mask", "mixed"):
            continue
        try:
            with limit(budget.left / 2):  # what it compiled until then is in its cache for the next class
                found = fla(tensors, options, bounds)
        except Exception as error:  # the class has no row of the peer
            print(f"fla {name}: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
        else:
            note("chunk_kda", "fla", name, dtype, found, o, state)
        if budget.left <= 0:
            break
    return data


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
    found = {(row["case"], row["op"], row["implementation"], row["dtype"]): row for row in data["rows"]}
    chunk, step = "chunk_kda", "fused_recurrent_kda"
    columns = [(chunk, "kdagen", "bfloat16"), (chunk, "fla", "bfloat16"), (chunk, "kdagen", "float16"),
               (chunk, "kdagen", "float32"), (step, "kdagen", "bfloat16"), (step, "kdagen", "float16"),
               (step, "kdagen", "float32")]
    columns = [column for column in columns if any(key[1:] == column for key in found)]
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    names = [f"{op}{' of fla' if who == 'fla' else ''}, {short[dtype]}" for op, who, dtype in columns]
    out = [f"| inputs | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for name, words in ((name, words) for name, words in CLASSES.items() if any(key[0] == name for key in found)):
        cells = [found.get((name, *column)) for column in columns]
        errors = [f"{cell['error']:.1e} / {cell['state_error']:.1e}" if cell else "" for cell in cells]
        out.append(f"| {words} | {' | '.join(errors)} |")
    env, at = data["environment"], data["conditions"]
    others = dict.fromkeys(row["implementation"] for row in data["rows"] if row["implementation"] != "kdagen")
    peers = ", ".join(f"{who} {env['peers'].get(who, '')}" for who in others) or "none"
    lengths = ", ".join(map(str, at["lengths"]))
    return "\n".join([
        *out, "", "Relative error of the output / of the final state (of the sequences with tokens) against the chunk form "
        f"in fp64; sequences of {lengths} tokens, H = {at['heads']}, K = {at['K']}, V = {at['V']}; {env['gpu']}, torch "
        f"{env['torch']}, Triton {env['triton']}; peers: {peers}."])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--table", "only_table", is_flag=True, help="write the table from the JSON, measure nothing")
@click.option("--check", is_flag=True, help="write nothing; print what differs, exit 1 if anything does")
@click.option("--budget", default="5m", show_default=True, help="the peer gets what ours leave of it: 90s, 5m")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, show_default=True)
def main(only_table, check, budget, out):
    """Measure, or draw the table."""
    if not only_table and not check:
        from kdagen import devices, files
        from kdagen.errors import KdagenError
        from kdagen.tuning.command import seconds

        machine = devices.machine()
        if machine is None:
            raise SystemExit("accuracy: no GPU on this machine, expected one. The committed figures: docs/limits.md")
        try:
            budget_s = seconds(budget)
        except KdagenError as error:
            raise SystemExit(f"accuracy: {error}") from None
        path = out / f"{machine.slug}-accuracy.json"
        data = measure(budget_s, lambda data: files.write_if_different(path, json.dumps(data, indent=1) + "\n"))
        click.echo(table(data))
        click.echo(f"wrote {path}. Next: python scripts/accuracy.py --table")
        return
    data = json.loads(next(iter(sorted(FOLDER.glob("*-accuracy.json")))).read_text())
    differs = put(DOCUMENT, marked(DOCUMENT.read_text(), "accuracy", table(data)), check=check,
                  command="python scripts/accuracy.py --table")
    sys.exit(check and differs)


if __name__ == "__main__":
    main()
