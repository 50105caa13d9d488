"""The fast launch path on a device: what it launches is what Triton would, on the right device and stream."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.gpu


@triton.jit(do_not_specialize=["n"])
def _scale(p_x, p_y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(p_x + i, mask=i < n) * factor
    if p_y is not None:
        y += tl.load(p_y + i, mask=i < n)
    tl.store(p_x + i, y, mask=i < n)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("factor", [1, 2, 16, 3])
@pytest.mark.parametrize("added", [True, False])
def test_same_results_as_triton(offset, factor, added):
    from kdagen.launch import FastKernel

    fast = FastKernel(_scale)
    for n in (1, 16, 100, 4096):
        for _ in range(3):  # the first call compiles, the others take the fast path
            x = torch.randn(n + offset, device="cuda")[offset:]
            y = torch.randn(n, device="cuda") if added else None
            want = x * factor + (y if added else 0)
            fast[(triton.cdiv(n, 128),)](x, y, n, factor, BLOCK=128, num_warps=4)
            torch.testing.assert_close(x, want)


def test_current_stream_is_honoured():
    from kdagen.launch import FastKernel

    fast, stream = FastKernel(_scale), torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    fast[(8192,)](x, None, x.numel(), 1, BLOCK=128, num_warps=4)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        fast[(8192,)](x, None, x.numel(), 5, BLOCK=128, num_warps=4)
    assert not stream.query(), "the launch did not go to the current stream"
    stream.synchronize()
    assert bool((x == 5).all())


def test_captured_in_a_graph():
    from kdagen.launch import FastKernel

    fast = FastKernel(_scale)
    x = torch.ones(1000, device="cuda")
    fast[(8,)](x, None, 1000, 3, BLOCK=128, num_warps=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fast[(8,)](x, None, 1000, 3, BLOCK=128, num_warps=4)
    for _ in range(3):
        graph.replay()
    assert bool((x == 81).all())
