"""Signatures that users already call: flash-linear-attention's (``compat.fla``) and vLLM's (``compat.vllm``)."""
