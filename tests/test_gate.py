"""The gate op: kernels in the interpreter and the CPU path against the oracle; gradients, strides, refusals."""

from __future__ import annotations

import pytest
import torch

from inputs import cu_seqlens, gate_parameter, ragged, relative, sliced
from kdagen import families
from kdagen import reference as R
from kdagen.errors import ArgumentError, ArgumentTypeError
from kdagen.ops import gate as module
from kdagen.ops.gate import kda_gate
from kdagen.ops.metadata import step_tables
from kdagen.spec import Problem, Schedule, Spec

# fp32 arithmetic: exp2 and division are good to 2e-7, a sum of 128 decays adds about as much
FP32 = 2e-6
FORMS = {"softplus": {}, "bounded": {"lower_bound": -5.0}}


def tensors(rng, *shape, dtype=torch.float32):
    HV, K = shape[2:]
    g = (torch.randn(*shape, generator=rng) * 3).to(dtype)
    return g, gate_parameter(rng, HV), torch.randn(HV, K, generator=rng)


@pytest.fixture(params=["interpreter", "cpu"])
def path(request, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "interpreter" else "0")
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU")
    return request.param


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("shape", "dtype"), [
    ((1, 37, 3, 16), torch.float32), ((2, 5, 2, 48), torch.float16), ((2, 3, 1, 200), torch.float32),
])
def test_decay_and_beta(rng, path, form, shape, dtype):
    g, A_log, bias = tensors(rng, *shape, dtype=dtype)
    beta = torch.randn(shape[:3], generator=rng).to(dtype)
    out = torch.full(shape, float("nan"))
    decay, strength = kda_gate(g, A_log, bias, **FORMS[form], beta=beta, allow_neg_eigval=True, out=out)
    assert decay is out and decay.dtype == strength.dtype == torch.float32
    assert relative(decay, R.kda_gate(g, A_log, bias, **FORMS[form])) < FP32
    assert relative(strength, R.kda_beta(beta, True)) < FP32
    plain = kda_gate(g, A_log, bias.flatten(), **FORMS[form])
    assert torch.equal(plain, decay)


def test_parameters_may_be_missing(rng, path):
    g, A_log, _ = tensors(rng, 1, 9, 2, 8)
    assert relative(kda_gate(g, lower_bound=-3.0), R.kda_gate(g, lower_bound=-3.0)) < FP32
    assert relative(kda_gate(g, A_log), R.kda_gate(g, A_log)) < FP32


def test_small_decays_keep_their_digits(rng, path):
    """softplus(x) for x far below 0 is about e^x: log(1 + e^x) in fp32 would lose it, and slow decays add up."""
    g = torch.linspace(-20, -8, 96).reshape(1, 12, 1, 8)
    decay, want = kda_gate(g, torch.zeros(1)), R.kda_gate(g, torch.zeros(1))
    assert ((decay.double() - want) / want).abs().max() < 5e-6
    hard = torch.tensor([-1e4, 0.0, 19.9, 20.1, 1e4]).reshape(1, 5, 1, 1)
    assert relative(kda_gate(hard, torch.zeros(1)), R.kda_gate(hard, torch.zeros(1))) < FP32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_cumulative_sums_start_anew_at_each_chunk(rng, path, chunk_size, form):
    lengths = [0, 1, chunk_size + 1, *ragged(rng, 2, chunk_size)]
    g, A_log, bias = tensors(rng, 1, sum(lengths), 2, 40)
    edges = cu_seqlens(lengths)
    table = R.chunk_table(edges, chunk_size)[0]
    decay = R.kda_gate(g, A_log, bias, **FORMS[form])
    out = torch.full(g.shape, float("nan"))
    kda_gate(g, A_log, bias, **FORMS[form], chunk_size=chunk_size, cu_seqlens=edges, chunk_indices=table.long(), out=out)
    assert relative(out, R.chunk_cumsum(decay, chunk_size, edges)) < FP32
    rows = torch.randn(2, chunk_size + 3, 2, 40, generator=rng)
    want = R.chunk_cumsum(R.kda_gate(rows, A_log, bias, **FORMS[form]), chunk_size)
    assert relative(kda_gate(rows, A_log, bias, **FORMS[form], chunk_size=chunk_size), want) < FP32


def test_a_prefix_gives_the_same_bits_whatever_follows(rng):
    g, A_log, bias = tensors(rng, 1, 50, 1, 16)
    other = torch.cat([g[:, :37], torch.full_like(g[:, 37:], 1e4)], 1)
    first, second = (kda_gate(x, A_log, bias, chunk_size=32)[:, :37] for x in (g, other))
    assert torch.equal(first, second) and torch.equal(first, kda_gate(g[:, :37], A_log, bias, chunk_size=32))


def test_slices_of_a_projection(rng, path):
    g, A_log, bias = tensors(rng, 2, 7, 3, 20)
    beta = torch.randn(2, 7, 3, generator=rng)
    want = kda_gate(g, A_log, bias, beta=beta)
    out = sliced(rng, torch.zeros_like(g))
    got = kda_gate(sliced(rng, g), A_log, bias, beta=sliced(rng, beta), out=out)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    around = torch.as_strided(out, (2, 7, 76), (7 * 76, 76, 1), 0)
    assert around[..., :8].isnan().all() and around[..., 68:].isnan().all()


def test_no_tokens(rng, path):
    g, A_log, bias = tensors(rng, 1, 0, 2, 8)
    assert kda_gate(g, A_log, bias).shape == g.shape
    empty = cu_seqlens([0, 0])
    assert kda_gate(g, A_log, bias, chunk_size=16, cu_seqlens=empty, chunk_indices=R.chunk_table(empty, 16)[0]).numel() == 0


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_formula(rng, form):
    g, A_log, bias = tensors(rng, 2, 5, 3, 8)
    leaves = [g, A_log, bias, torch.randn(2, 5, 3, generator=rng)]
    d_decay, d_beta = torch.randn(g.shape, generator=rng), torch.randn(2, 5, 3, generator=rng)
    exact = [t.double().requires_grad_() for t in leaves]
    want = R.kda_gate(*exact[:3], **FORMS[form]), R.kda_beta(exact[3], True)
    torch.autograd.backward(want, (d_decay.double(), d_beta.double()))
    ours = [t.clone().requires_grad_() for t in leaves]
    got = kda_gate(*ours[:3], **FORMS[form], beta=ours[3], allow_neg_eigval=True)
    torch.autograd.backward(got, (d_decay, d_beta))
    assert relative(got[0], want[0]) < FP32
    for a, b in zip(ours, exact):
        # the parameters' gradients are fp32 sums over tokens and channels whose terms cancel in part
        assert a.grad.dtype == a.dtype and relative(a.grad, b.grad) < 10 * FP32
    alone = g.clone().requires_grad_()
    kda_gate(alone, A_log, bias, **FORMS[form]).backward(d_decay)
    assert torch.equal(alone.grad, ours[0].grad)


def test_gradients_that_are_not_there_are_refused(rng):
    g, A_log, _ = tensors(rng, 1, 4, 1, 8)
    with pytest.raises(ArgumentError, match=r"chunk_size.*no_grad"):
        kda_gate(g.requires_grad_(), A_log, chunk_size=16)
    with torch.no_grad():
        assert not kda_gate(g, A_log, chunk_size=16).requires_grad


def test_compiles_into_one_graph(rng, path):
    g, A_log, bias = tensors(rng, 1, 6, 2, 8)
    beta = torch.randn(1, 6, 2, generator=rng)

    def layer(g, beta):
        decay, strength = kda_gate(g * 2, A_log, bias, lower_bound=-5.0, beta=beta)
        return decay.exp(), strength + kda_gate(g, A_log, chunk_size=16).sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(g, beta), layer(g, beta)):
        assert torch.equal(got, want)


def test_trains_inside_a_compiled_graph(rng):
    g, A_log, bias = tensors(rng, 1, 6, 2, 8)
    loss = lambda g: kda_gate(g * 2, A_log, bias, lower_bound=-5.0).square().sum()
    ours, eager = g.clone().requires_grad_(), g.clone().requires_grad_()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(ours).backward()
    loss(eager).backward()
    assert relative(ours.grad, eager.grad) < FP32 and eager.grad.abs().max() > 0


REFUSALS = {
    "g [B, T, H]": (lambda x: x | {"g": x["g"][..., 0]}, r"g: got shape \[1, 4, 2\], expected shape \[B, T, HV, K\]"),
    "g of int": (lambda x: x | {"g": x["g"].int()}, r"g: got torch.int32"),
    "g across K": (lambda x: x | {"g": x["g"].transpose(1, 3).contiguous().transpose(1, 3)}, r"g: got strides"),
    "A_log": (lambda x: x | {"A_log": torch.zeros(3)}, r"A_log: got shape \[3\], expected shape \[2\]"),
    "no form": (lambda x: x | {"A_log": None}, r"A_log: got None"),
    "dt_bias": (lambda x: x | {"dt_bias": torch.zeros(7)}, r"dt_bias: got shape \[7\], expected shape \[16\]"),
    "lower_bound": (lambda x: x | {"lower_bound": 5.0}, r"lower_bound: got 5.0"),
    "beta [B, T, H, 1]": (lambda x: x | {"beta": torch.zeros(1, 4, 2, 1)}, r"beta: got shape \[1, 4, 2, 1\]"),
    "out of bf16": (lambda x: x | {"out": torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)}, r"out: got torch.bfloat16"),
    "out of another shape": (lambda x: x | {"out": torch.zeros(1, 4, 8, 2)}, r"out: got shape"),
    "chunk 48": (lambda x: x | {"chunk_size": 48}, r"chunk_size: got 48"),
    "chunk 0": (lambda x: x | {"chunk_size": 0}, r"chunk_size: got 0"),
    "no table": (lambda x: x | {"chunk_size": 16, "cu_seqlens": cu_seqlens([4])}, r"prepare_chunk_metadata_device"),
    "table": (lambda x: x | {"chunk_size": 16, "cu_seqlens": cu_seqlens([4]), "chunk_indices": torch.zeros(2)},
              r"chunk_indices: got torch.float32"),
    "boundaries": (lambda x: x | {"chunk_size": 16, "cu_seqlens": cu_seqlens([5]),
                                  "chunk_indices": torch.zeros(1, 2, dtype=torch.int32)}, r"cu_seqlens: got \[0, 5\]"),
    "device": (lambda x: x | {"beta": torch.zeros(1, 4, 2, device="meta")}, r"beta: got a tensor on meta"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(rng, case):
    change, message = REFUSALS[case]
    g, A_log, bias = tensors(rng, 1, 4, 2, 8)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        kda_gate(**change(dict(g=g, A_log=A_log, dt_bias=bias)))


def test_unknown_keyword_and_bf16_in_the_interpreter(rng, monkeypatch):
    g, A_log, _ = tensors(rng, 1, 4, 2, 8)
    with pytest.raises(TypeError, match="use_gate"):
        kda_gate(g, A_log, use_gate=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentTypeError, match="bfloat16 under TRITON_INTERPRET"):
            kda_gate(g.bfloat16(), A_log)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert relative(kda_gate(g.bfloat16(), A_log), R.kda_gate(g.bfloat16(), A_log)) < FP32


def test_unchecked_calls_skip_the_checks(rng, monkeypatch):
    g, A_log, _ = tensors(rng, 1, 4, 2, 8)
    monkeypatch.setattr(module, "_check", lambda *arguments: pytest.fail("checked"))
    kda_gate(g, A_log, checked=False)
    with pytest.raises(BaseException, match="checked"):
        kda_gate(g, A_log)


def test_every_default_is_supported_and_announced():
    family = families.get("gate")
    for k in (1, 16, 48, 128, 256, 1000):
        for chunk in (0, 16, 32, 64, 128):
            spec = Spec.make("gate", chunk=chunk, k=k, dtype="bf16")
            for problem in (None, Problem(1, 1, 1), Problem(1 << 20, 1, 32)):
                schedule = family.default(spec, None, problem)
                assert family.supports(spec, schedule, None) is None
                assert schedule in family.default_schedules(spec)
    spec = Spec.make("gate", chunk=64, k=128, dtype="bf16")
    assert "more than 16" in family.supports(spec, Schedule.make(bt=32, bk=64), None)
    plain = Spec.make("gate", k=128, dtype="bf16")
    assert "a thread" in family.supports(plain, Schedule.make(bt=64, bk=128, warps=1), None)
    assert "1..1024" in family.supports(Spec.make("gate", k=2048, dtype="bf16"), Schedule.make(bt=4, bk=64), None)


def test_rows_of_a_bounded_table_that_are_not_used(rng):
    """Rows of -1 write nothing: neither before ``out`` nor in it, whatever lies in front of the boundaries."""
    T, H, K = 100, 2, 64
    g, A_log = torch.randn(1, T, H, K, generator=rng), torch.zeros(H)
    store = torch.tensor([40, 0, 30, T], dtype=torch.int32)
    edges = store[1:]
    table = step_tables(edges, tokens=4 * T).chunk_indices
    assert (table < 0).any()
    around = torch.full((1, 3 * T, H, K), 7.0)
    options = dict(chunk_size=64, cu_seqlens=edges)
    kda_gate(g, A_log, chunk_indices=table, out=around[:, T:2 * T], **options)
    exact = step_tables(edges, edges).chunk_indices
    assert torch.equal(around[:, T:2 * T], kda_gate(g, A_log, chunk_indices=exact, **options))
    assert (around[:, :T] == 7).all() and (around[:, 2 * T:] == 7).all()
