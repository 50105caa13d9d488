"""The sizes of a KDA layer, whole or one tensor-parallel shard of it, and where each part of its packed projection lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdagen.errors import refuse
from kdagen.families.recurrent import MAX_HEAD_DIM
from kdagen.ops._common import check_number

ALIGN = 64  # columns: every part of a projected row starts on 128 bytes in bf16


@dataclass(frozen=True, slots=True)
class KDAConfig:
    """Sizes of one rank. P = heads * head_dim.

    lower_bound: None for the softplus gate, a float in [-5, 0) for the bounded one. gate_rank: rank of the projection
    hidden -> raw gate. output_gate_rank: rank of hidden -> output gate, None for a full one that is part of the packed
    projection. allow_neg_eigval: beta in (0, 2).
    """

    hidden: int
    heads: int
    head_dim: int = 128
    conv_width: int = 4
    lower_bound: float | None = None
    gate_rank: int = 128
    output_gate_rank: int | None = None
    norm_eps: float = 1e-5
    allow_neg_eigval: bool = False

    def __post_init__(self):
        for name in ("hidden", "heads", "head_dim", "gate_rank", "output_gate_rank"):
            value = getattr(self, name)
            if (value is not None or name != "output_gate_rank") and (not isinstance(value, int) or value < 1):
                refuse(name, repr(value), "an int of at least 1")
        if self.head_dim > MAX_HEAD_DIM:
            refuse("head_dim", self.head_dim, f"at most {MAX_HEAD_DIM}, as the kernels take")
        check_number("lower_bound", self.lower_bound)
        check_number("norm_eps", self.norm_eps)
        if self.conv_width not in (2, 3, 4):
            refuse("conv_width", self.conv_width, "2, 3 or 4")
        if self.lower_bound is not None and not -5 <= self.lower_bound < 0:
            refuse("lower_bound", self.lower_bound, "a number in [-5, 0), or None for the softplus gate")

    @classmethod
    def kimi_linear(cls) -> KDAConfig:
        """Kimi-Linear-48B-A3B, one layer."""
        return cls(hidden=2304, heads=32, output_gate_rank=128)

    @classmethod
    def kimi_k3(cls) -> KDAConfig:
        """Kimi-K3, one layer."""
        return cls(hidden=7168, heads=96, lower_bound=-5.0)

    def shard(self, tp_size: int) -> KDAConfig:
        """The sizes of one of ``tp_size`` ranks: its own heads, the whole hidden size and ranks."""
        if tp_size < 1 or self.heads % tp_size:
            refuse("tp_size", tp_size, f"a divisor of the {self.heads} heads")
        return replace(self, heads=self.heads // tp_size)

    @property
    def P(self) -> int:
        """Channels of each of q, k, v and of the output on this rank."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> dict[str, slice]:
        """Columns of the packed projection: qkv (3P), the output gate (P, or its low rank), f_a, beta.

        The order puts the rows that the decode step streams first; every part starts on an aligned column.
        """
        widths = {"qkv": 3 * self.P, "z": self.P if self.output_gate_rank is None else self.output_gate_rank,
                  "f_a": self.gate_rank, "beta": self.heads}
        parts, start = {}, 0
        for name, width in widths.items():
            parts[name] = slice(start, start + width)
            start += -(-width // ALIGN) * ALIGN
        return parts

    @property
    def packed(self) -> int:
        """Columns of the packed projection, padding included."""
        last = self.parts["beta"]
        return -(-last.stop // ALIGN) * ALIGN

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of a rank's tensors. A_log, dt_bias, conv and norm are fp32, the others in the model's dtype."""
        shapes = {
            "in_proj": (self.packed, self.hidden), "f_b": (self.P, self.gate_rank), "conv": (3 * self.P, self.conv_width),
            "A_log": (self.heads,), "dt_bias": (self.heads, self.head_dim), "norm": (self.head_dim,),
            "out_proj": (self.hidden, self.P),
        }
        if self.output_gate_rank is not None:
            shapes["z_b"] = (self.P, self.output_gate_rank)
        return shapes
