"""Oracle of the depthwise causal convolution, for prefill and for (speculative) decode (docs/kda.md, "The layer")."""

from __future__ import annotations

import torch

from kdagen.reference.gate import boundaries


def convolve(window: torch.Tensor, weight, bias=None, activation: str | None = "silu") -> torch.Tensor:
    """y_t = act(sum_w weight[:, w] x_{t + w} + bias): window [W-1+T, D] -> [T, D]; weight [D, W]; act SiLU or None."""
    W = weight.shape[-1]
    T = window.shape[0] - (W - 1)
    y = sum(window[w : w + T] * weight[:, w].to(window.dtype) for w in range(W))
    y = y if bias is None else y + bias.to(window.dtype)
    return y * torch.sigmoid(y) if activation in ("silu", "swish") else y


def causal_conv1d(
    x, weight, bias=None, *, initial_state=None, activation: str | None = "silu", cu_seqlens=None,
    output_final_state=False, dtype=torch.float64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y [B, T, D], final conv state [N, W-1, D] or None) of x [B, T, D], packed by cu_seqlens [N+1] if given (B = 1).

    weight [D, W], bias [D] or None. initial_state [N, W-1, D] holds the W-1 inputs before each sequence, oldest
    first (zeros without it); the final state holds the last W-1 inputs, initial ones included where T < W-1.
    """
    spans = boundaries(cu_seqlens, x.shape[0], x.shape[1])
    history = x.new_zeros(len(spans), weight.shape[-1] - 1, x.shape[-1]) if initial_state is None else initial_state
    y, final = torch.zeros(x.shape, dtype=dtype, device=x.device), history.to(dtype).clone()
    for n, (row, start, end) in enumerate(spans):
        window = torch.cat([history[n].to(dtype), x[row, start:end].to(dtype)])
        y[row, start:end] = convolve(window, weight, bias, activation)
        final[n] = window[end - start :]
    return y, final if output_final_state else None


def causal_conv1d_update(
    x, pool, weight, bias=None, *, state_indices, num_accepted_tokens=None, has_initial_state=None, cu_seqlens=None,
    activation: str | None = "silu", pad_slot=-1, dtype=torch.float64,
) -> torch.Tensor:
    """y [B, T, D] of x [B, T, D] (rows = B, or the sequences of cu_seqlens); ``pool`` [slots, W-1+k, D] changes in place.

    A row's line is pool[state_indices[s]] (column 0 of a 2-D table).
    Plain (num_accepted_tokens None): history = columns 0..W-2; afterwards they hold the last W-1 inputs.
    Speculative: history = the W-1 columns from accepted - 1 on (accepted clamped to 1..1+k); afterwards the line is
    history[1:] and all new tokens, from column 0 on, so that the next step's accepted - 1 finds its place again.
    has_initial_state [S] bool: False takes zeros for the history. A slot outside the pool or equal to pad_slot is padding:
    neither read nor written, output zero.
    """
    W, slots = weight.shape[-1], (state_indices if state_indices.dim() == 1 else state_indices[:, 0]).tolist()
    k = pool.shape[1] - (W - 1)
    y = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for s, (row, start, end) in enumerate(boundaries(cu_seqlens, x.shape[0], x.shape[1])):
        if not 0 <= slots[s] < len(pool) or slots[s] == pad_slot or start == end:
            continue
        line = pool[slots[s]]
        speculative = num_accepted_tokens is not None
        offset = min(max(int(num_accepted_tokens[s]), 1), 1 + k) - 1 if speculative else 0
        history = line[offset : offset + W - 1].to(dtype)
        if has_initial_state is not None and not bool(has_initial_state[s]):
            history = torch.zeros_like(history)
        window = torch.cat([history, x[row, start:end].to(dtype)])
        y[row, start:end] = convolve(window, weight, bias, activation)
        kept = window[1:] if speculative else window[end - start :]
        line[: len(kept)] = kept.to(pool.dtype)
    return y
