"""What an engine takes as a whole: classification of a batch, persistent graph inputs, state pools, the layer, a loop."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "Batch": "batch", "Checkpoint": "batch", "CheckpointTable": "batch", "KDAMetadata": "batch", "NULL_SLOT": "batch",
    "KDAMetadataBuilder": "builder", "GraphStaging": "staging", "StaleGraphInput": "staging",
    "CacheFull": "cache", "KDACache": "cache",
    "KDAConfig": "config", "KDALayer": "layer", "random_weights": "layer", "shard_weights": "layer",
    "DecodeGraphs": "graphs", "Engine": "engine", "Request": "engine", "run_demo": "loop",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"kdagen.serving.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
