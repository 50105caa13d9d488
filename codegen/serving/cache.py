"""The two state pools of a KDA layer, who owns which slot, and prefixes kept for later requests.

Recurrent states are [slots, H, V, K], convolution lines [slots, width-1+k, channels]; one slot number addresses both.
Slot 0 is reserved: block tables are padded with it, no kernel reads or writes it, and the allocator never hands it out.

A freed slot keeps its last owner's state, and that may be NaN. Two rules keep it from the next owner: kernels do not read
a slot whose row has no initial state, and by default a slot is zeroed when it is handed out, which also covers engines
that decode a one-token prompt without saying that it is a first chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from numbers import Integral

import numpy as np
import torch

from kdagen.errors import ArgumentTypeError, KdagenError, refuse
from kdagen.ops._common import FLOATS
from kdagen.serving.batch import NULL_SLOT, to_device

ZERO_POLICIES = ("allocate", "never")


class CacheFull(KdagenError, RuntimeError):
    """Not enough free slots; nothing was allocated."""


class KDACache:
    """Pools of one layer.

    heads, k_dim, v_dim: the rank's own heads. channels: of the packed q|k|v. num_spec: k. state_dtype: float32, or
    bfloat16 or float16 for half the traffic (the arithmetic stays fp32). zero: "allocate" zeroes slots when they are handed
    out, "never" relies on ``has_initial_state`` alone. poison: fill freed slots with NaN, to prove that nothing reads them.
    """

    def __init__(self, slots: int, heads: int, k_dim: int, v_dim: int, channels: int, *, width: int = 4, num_spec: int = 0,
                 state_dtype: torch.dtype = torch.float32, conv_dtype: torch.dtype = torch.bfloat16, device="cpu",
                 zero: str = "allocate", poison: bool = False):
        if slots < 2:
            refuse("slots", slots, "at least 2: slot 0 is reserved for padding")
        if zero not in ZERO_POLICIES:
            refuse("zero", repr(zero), " or ".join(map(repr, ZERO_POLICIES)))
        for name, dtype in (("state_dtype", state_dtype), ("conv_dtype", conv_dtype)):
            if dtype not in FLOATS:
                refuse(name, repr(dtype), " or ".join(map(str, FLOATS)), kind=ArgumentTypeError)
        self.recurrent = torch.zeros(slots, heads, v_dim, k_dim, dtype=state_dtype, device=device)
        self.conv = torch.zeros(slots, width - 1 + num_spec, channels, dtype=conv_dtype, device=device)
        self.device = self.recurrent.device
        self.zero_policy, self.poison = zero, poison
        self._free = list(range(slots - 1, NULL_SLOT, -1))
        self._owned: set[int] = set()
        self._prefixes: OrderedDict[Hashable, int] = OrderedDict()
        if poison:
            self._fill(self._free, float("nan"))

    @property
    def slots(self) -> int:
        return self.recurrent.shape[0]

    @property
    def free_slots(self) -> int:
        """Slots that ``allocate`` can hand out, those of forgettable prefixes included."""
        return len(self._free) + len(self._prefixes)

    @property
    def bytes(self) -> int:
        return sum(pool.numel() * pool.element_size() for pool in (self.recurrent, self.conv))

    def allocate(self, count: int = 1) -> list[int]:
        """``count`` fresh slots; prefixes are forgotten, oldest use first, where no others are free."""
        if not isinstance(count, Integral) or count < 0:
            refuse("count", repr(count), "a number of slots, 0 or more")
        if count > self.free_slots:
            raise CacheFull(f"slots: got a request for {count}, expected at most {self.free_slots} of {self.slots - 1}. "
                            "Finish or preempt a request, or make the cache with more slots.")
        while len(self._free) < count:
            self._free.append(self._prefixes.popitem(last=False)[1])
        slots = [self._free.pop() for _ in range(count)]
        self._owned.update(slots)
        if self.zero_policy == "allocate":
            self._fill(slots, 0.0)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. A slot that is not out, or the reserved one, is refused: two owners would share a state."""
        wrong = [slot for slot in slots if slot not in self._owned]
        if wrong or len(set(slots)) != len(slots):
            refuse("slots", list(slots), "slots that are allocated, each once", f"Not allocated: {wrong}." if wrong else "")
        self._owned.difference_update(slots)
        self._free.extend(slots)
        if self.poison:
            self._fill(slots, float("nan"))

    def copy(self, source: int, target: int) -> None:
        """The whole state of one slot (recurrent and convolution) over another's."""
        self._check_slot("source", source)
        self._check_slot("target", target)
        for pool in (self.recurrent, self.conv):
            pool[target].copy_(pool[source])

    # -- prefixes: interior states at chunk boundaries --------------------------------------------------------------

    def remember(self, prefix: Hashable, slot: int) -> None:
        """Keep an allocated slot as the state after ``prefix``; the cache owns it from now on and may forget it."""
        if slot not in self._owned:
            refuse("slot", slot, "an allocated slot that holds the prefix's state")
        self._owned.discard(slot)
        known = self._prefixes.pop(prefix, None)
        if known is not None:
            self._free.append(known)
        self._prefixes[prefix] = slot

    def recall(self, prefix: Hashable, target: int) -> bool:
        """Copy the state kept after ``prefix`` into ``target``; False, and nothing done, where it is unknown."""
        self._check_slot("target", target)
        slot = self._prefixes.get(prefix)
        if slot is None:
            return False
        self._prefixes.move_to_end(prefix)
        self.copy(slot, target)
        return True

    def _check_slot(self, name: str, slot: int) -> None:
        if not isinstance(slot, Integral) or not NULL_SLOT < slot < self.slots:
            refuse(name, repr(slot), f"a slot, 1 to {self.slots - 1}", "Slot 0 is reserved for padding.")

    def _fill(self, slots: Sequence[int], value: float) -> None:
        if slots:
            index = to_device(np.asarray(slots, np.int64), self.device)
            self.recurrent.index_fill_(0, index, value)
            self.conv.index_fill_(0, index, value)
