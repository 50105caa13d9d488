"""What outlives a call lies outside of the caller's memory pools, where torch would give its memory away again."""

from __future__ import annotations

import pytest
import torch

from inputs import kda
from kdagen.ops import _lanes, _scratch, prefill_plan
from kdagen.ops.prefill import chunk_kda

pytestmark = pytest.mark.gpu


def pool_of(tensor) -> tuple[int, int]:
    """The memory pool of a tensor: (0, 0) is the one of all who are in no other."""
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise LookupError("an address of no segment")


@pytest.fixture
def fresh(monkeypatch):
    for name in ("_blocks", "_streams", "_captures", "_low"):
        monkeypatch.setattr(_scratch, name, {})
    for name in ("_matrices", "_uniform"):
        monkeypatch.setattr(prefill_plan, name, _lanes.Constants(8))


@pytest.mark.parametrize("side", [False, True])
def test_inside_a_memory_pool(fresh, side):
    pool, constants, index = torch.cuda.MemPool(), _lanes.Constants(1), torch.cuda.current_device()
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        passing = torch.ones(1, device="cuda")
        made = _scratch.scratch(passing.device, index, 1 << 20, 1 << 20)
        kept, = constants.get("a", passing, lambda: (torch.full((1 << 20,), 7.0, device="cuda"),))
        assert (kept == 7).all() and not made.counters.any(), "they are made on this stream"
    assert pool_of(passing) != (0, 0)
    del passing
    assert {pool_of(x) for x in (made.counters, made.values, kept, _scratch._blocks[index].memory)} == {(0, 0)}


def test_a_first_call_in_the_warming_up_of_a_compiled_graph(rng, fresh):
    tensors, options = kda(rng, "bounded", T=256, H=2, K=128, V=128, dtype=torch.bfloat16)
    tensors, options = ({name: x.cuda() if torch.is_tensor(x) else x for name, x in values.items()}
                        for values in (tensors, options))
    compiled = torch.compile(lambda x: chunk_kda(**(tensors | x), **options)[0] * 2, mode="reduce-overhead")
    with torch.no_grad():
        for scale in (1.0, 0.5, 2.0, 0.25, 1.0):
            x = {"v": tensors["v"] * scale}
            got = compiled(x).clone()
            kept = [t for one in (prefill_plan._matrices, prefill_plan._uniform) for made in one._made.values()
                    for t in made.tensors]
            assert kept and {pool_of(t) for t in kept} == {(0, 0)}
            assert torch.equal(got, chunk_kda(**(tensors | x), **options)[0] * 2)
    torch.compiler.reset()
