"""kdagen: generated Triton kernels for Kimi Delta Attention.

The public API, loaded on first use: importing kdagen imports neither torch nor triton, and touches no device.
"""

from importlib import import_module

# name -> the module that defines it
_PUBLIC = {
    # metadata
    "prepare_chunk_metadata_device": "ops.metadata",
    "build_conv1d_chunk_schedule": "ops.metadata",
    "step_tables": "ops.metadata",
    "stage_spec_decode_metadata": "ops.staging",
    # one layer's operators
    "causal_conv1d": "ops.conv",
    "causal_conv1d_update": "ops.conv",
    "kda_gate": "ops.gate",
    "gated_rmsnorm": "ops.norm",
    "fused_recurrent_kda": "ops.decode",
    "kda_decode_step": "ops.decode_step",
    "chunk_kda": "ops.prefill",
    # dispatch
    "pin": "dispatch",
    "pick": "dispatch",
    "explain": "dispatch",
    "digest": "dispatch",
    # types and errors
    "Spec": "spec",
    "Schedule": "spec",
    "Problem": "spec",
    "Target": "spec",
    "KdagenError": "errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kdagen' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(import_module(f"kdagen.{_PUBLIC[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton", "numpy"):
            raise
        raise ModuleNotFoundError(f"kdagen.{name} needs {error.name}, which is not installed. "
                                  "Run: pip install 'kdagen[launch]'", name=error.name) from error
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
