"""The public torch ops. Each module registers its ops as ``torch.ops.kdagen.*`` when it is imported."""
