"""kdagen: generated Triton kernels for Kimi Delta Attention."""
