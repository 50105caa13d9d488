"""From a Variant to its imported module: committed, on KDAGEN_VARIANT_PATH, in the cache, or rendered now into it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from kdagen import families, files, manifest
from kdagen.errors import CorruptFile, KdagenError, NoVariant, refuse
from kdagen.render import inputs_hash, render
from kdagen.spec import Variant

log = logging.getLogger("kdagen")
_said: set[str] = set()
_loading = threading.RLock()  # no thread may see a module that another one is still importing


def warn_once(message: str) -> None:
    """Log a message once per process."""
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)


def mode() -> str:
    """KDAGEN_MODE: ``tuned`` (the default), ``default`` (ignore tuned rows) or ``strict`` (never render)."""
    value = os.environ.get("KDAGEN_MODE", "tuned")
    if value not in ("tuned", "default", "strict"):
        refuse("KDAGEN_MODE", repr(value), "tuned, default or strict")
    return value


@cache
def committed() -> dict[str, dict]:
    """The manifest of generated/; empty, with one log line, if it is corrupted."""
    return _manifest(files.generated_dir())


def _manifest(folder: Path) -> dict[str, dict]:
    try:
        return manifest.read(folder)
    except CorruptFile as error:
        warn_once(f"skipped a manifest: {error}")
        return {}


def find(variant: Variant) -> Path | None:
    """The file that holds an up-to-date rendering of the variant, if one exists without rendering."""
    inputs = inputs_hash(variant)
    entry = committed().get(variant.name)
    path = files.generated_dir() / variant.path
    if entry and entry["inputs"] == inputs:
        if _holds(path, entry):
            return path
        warn_once(f"skipped {path}: missing, or its bytes differ from the manifest. Run: kdagen render")
    for folder in files.variant_dirs():
        if not folder.is_dir():
            warn_once(f"KDAGEN_VARIANT_PATH: {folder} is not a folder. Run: {command(variant)} --out {folder}")
            continue
        entry = _manifest(folder).get(variant.name)
        path = folder / variant.path
        if entry is None or not path.exists():
            continue
        if entry["inputs"] != inputs:
            warn_once(f"skipped {path}: rendered from other templates. Run: {command(variant)} --out {folder}")
        elif not _holds(path, entry):
            warn_once(f"skipped {path}: its bytes differ from its manifest. Run: {command(variant)} --out {folder}")
        else:
            return path
    return None


def _holds(path: Path, entry: dict) -> bool:
    """Whether the file has the bytes that its manifest entry states."""
    try:
        return files.digest(path.read_text()) == entry["sha256"]
    except (OSError, UnicodeDecodeError):
        return False


def command(variant: Variant) -> str:
    """The `kdagen render` line that makes a variant permanent."""
    return f"kdagen render --variant {variant.name}"


def cached(variant: Variant, *, asked_for: bool = False) -> Path:
    """Render into the cache. The file is compared with a fresh rendering, so a damaged one is replaced before import.

    What nobody ``asked_for`` is logged, with the command that makes it permanent.
    """
    rendered = render(variant)
    path = files.cache_dir() / rendered.inputs[:16] / variant.path
    try:
        written = files.write_if_different(path, rendered.text)
    except OSError as error:
        refuse("KDAGEN_CACHE", f"{files.cache_dir()} ({error.strerror})", "a folder that this user may write",
               f"Set it to one, or render ahead: {command(variant)} --out DIR, with DIR in KDAGEN_VARIANT_PATH",
               kind=KdagenError)
    if written and not asked_for:
        warn_once(f"{variant.name} is not among the committed variants: rendered it into {path}. "
                  f"To keep it: {command(variant)} --out DIR, with DIR in KDAGEN_VARIANT_PATH")
    return path


@cache
def load(variant: Variant) -> ModuleType:
    """The variant's module, with its kernels behind the fast launch path. Rendered if need be, refused in strict mode."""
    with _loading:
        return _load(variant)


def _load(variant: Variant) -> ModuleType:
    family = families.get(variant.spec.family)
    path = find(variant)
    if path is None:
        if mode() == "strict":
            near = sorted(name for name in committed() if name.startswith(variant.spec.family + "__"))[:4]
            refuse(f"variant {variant.name}", "KDAGEN_MODE=strict and no rendering of it",
                   f"a rendered variant (nearest: {', '.join(near) or 'none'})",
                   f"Run: {command(variant)} --out DIR, with DIR in KDAGEN_VARIANT_PATH", kind=NoVariant)
        path = cached(variant)
    if path.parent.parent == files.generated_dir():
        module = import_module(f"kdagen.generated.{variant.spec.family}.{variant.name}")
    else:
        module = _import_file(f"kdagen_rendered.{variant.name}_{files.digest(f'{path} {inputs_hash(variant)}')[:8]}", path)
    from kdagen.launch import accelerate

    return accelerate(module, {kernel.name for kernel in family.kernels(variant.spec, variant.schedule)})


def _import_file(name: str, path: Path) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
