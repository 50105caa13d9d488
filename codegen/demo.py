"""`kdagen demo`: the kernels on whatever this machine has, each result beside the oracle's.

A GPU launches them; without one, Triton's interpreter runs them on the CPU (fp32), and without Triton the CPU path does.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import click

from kdagen import cli


def run(*, seed: int = 0, quick: bool = False) -> int:
    """Print the demo's tables; 0 if every result agrees with its oracle, 1 if not."""
    if find_spec("torch") is None:
        click.echo("kdagen demo: torch is not installed, so nothing can run. Next: pip install 'kdagen[launch]', or look at "
                   "what needs no torch: kdagen list, kdagen show, kdagen explain")
        return 1
    import torch

    if not torch.cuda.is_available() and find_spec("triton"):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    device, how = _machine()
    click.echo(f"Running on {how}.\n")
    torch.manual_seed(seed)
    agrees = _step_tables(device)
    if not quick:
        from kdagen.serving import loop

        agrees = _prefill_and_decode(device) and agrees
        if device.type == "cpu":
            click.echo("The serving loop below takes the CPU path: to interpret all of its kernels would take minutes.\n")
        agrees = loop.show(device=device, seed=seed) and agrees
    click.echo("\nEvery result agrees with its oracle." if agrees else "\nA result differs from its oracle.")
    return 0 if agrees else 1


def _machine():
    """(device, what runs on it, in words)."""
    import torch

    from kdagen.ops._common import interpreting

    if torch.cuda.is_available():
        return torch.device("cuda"), f"a GPU: {torch.cuda.get_device_name()}, the kernels as compiled by Triton"
    if interpreting() and find_spec("triton"):
        return torch.device("cpu"), "the CPU, the kernels in Triton's interpreter"
    return torch.device("cpu"), "the CPU path, plain torch (Triton is not installed)"


def _step_tables(device) -> bool:
    """A ragged batch's step tables, through dispatch, beside the oracle's."""
    import torch

    from kdagen import devices, dispatch
    from kdagen.ops.metadata import step_tables
    from kdagen.reference import tables as oracle
    from kdagen.spec import Problem, Spec

    lengths = torch.randint(0, 200, (6,)).tolist()
    lengths[int(torch.randint(6, ()))] = 0
    host = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    made = step_tables(host.to(device), host, chunk_size=64, blocks=(8,))
    indices, offsets = oracle.chunk_table(host, 64)
    schedule = oracle.conv_schedule(host, 8)
    pairs = [
        ("chunk_indices", made.chunk_indices, indices),
        ("chunk_offsets", made.chunk_offsets, offsets),
        ("conv schedule, block 8: sequence", made.schedules[8]["batch_ptr"], schedule["batch_ptr"]),
        ("conv schedule, block 8: block", made.schedules[8]["token_chunk_offset_ptr"], schedule["token_chunk_offset_ptr"]),
    ]
    rows = []
    for name, ours, theirs in pairs:
        same = torch.equal(ours.cpu(), theirs)
        rows.append([name, list(ours.shape), _head(ours), _head(theirs), "equal" if same else "DIFFERS"])
    cli.print_table(f"Step tables of sequences of {lengths} tokens", ["table", "shape", "kdagen", "oracle", ""], rows)
    target = devices.machine() or devices.named("h200")
    spec = Spec.make("step_tables", chunk=64, dtype="i32", schedules=1)
    choice = dispatch.pick(spec, Problem(int(host[-1]), len(lengths), 1), target)
    where = "" if devices.machine() else f" (as dispatch decides for an {target.slug})"
    click.echo(f"Variant: {choice.variant.name}, {choice.schedule.warps} warps; chosen: {choice.how}{where}.\n"
               f"Why: kdagen explain step_tables --device {target.slug}\n")
    return all(row[-1] == "equal" for row in rows)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log line of variants rendered on demand, and the interpreter's warnings of values that a select drops."""
    log = logging.getLogger("kdagen")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        log.setLevel(before)


def _prefill_and_decode(device) -> bool:
    """A prompt through ``chunk_kda``, two tokens more through ``fused_recurrent_kda``, beside the recurrence in fp64."""
    import torch

    from kdagen.ops.decode import fused_recurrent_kda
    from kdagen.ops.prefill import chunk_kda
    from kdagen.reference import recurrent_kda

    dtype, limit = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float32, 1e-4)
    T, H, K = 70, 1, 128
    q, k, v, g = (torch.randn(1, T + 2, H, K, device=device).to(dtype) for _ in range(4))
    beta = torch.randn(1, T + 2, H, device=device).to(dtype)
    gate = dict(A_log=torch.zeros(H, device=device), dt_bias=torch.randn(H, K, device=device), lower_bound=-5.0,
                use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    exact, state_after = recurrent_kda(q, k, v, g, beta, output_final_state=True, **gate)
    with _quiet():
        prompt, state = chunk_kda(*(x[:, :T] for x in (q, k, v, g, beta)), output_final_state=True, **gate)
        tokens, state = fused_recurrent_kda(*(x[:, T:] for x in (q, k, v, g, beta)), initial_state=state,
                                            output_final_state=True, **gate)
    rows = []
    pairs = (("prefill, 70 tokens: o", prompt, exact[:, :T]), ("decode, 2 tokens: o", tokens, exact[:, T:]),
             ("state after all", state, state_after))
    for name, ours, theirs in pairs:
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        rows.append([name, list(ours.shape), str(dtype)[6:], f"{error:.1e}", "equal" if error < limit else "DIFFERS"])
    cli.print_table("Prefill, then decode, beside the recurrence in fp64", ["what", "shape", "inputs", "error", ""], rows)
    click.echo("")
    return all(row[-1] == "equal" for row in rows)


def _head(tensor) -> str:
    items = tensor.cpu().flatten().tolist()
    return " ".join(map(str, items[:14])) + (" ..." if len(items) > 14 else "")
