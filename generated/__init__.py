"""Rendered kernels: ``kdagen.generated.<family>.<variant>``. Written by `kdagen render`, checked by `kdagen check`."""
