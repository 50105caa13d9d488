"""What `kdagen doctor` says: modules, GPU, folders, settings and generated/, each with a verdict; nothing is left behind."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kdagen import devices, dispatch, families, files, loader, manifest, project
from kdagen.errors import KdagenError
from kdagen.spec import parse

MODULES = {
    "jinja2": "nothing renders", "click": "no command line", "rich": "no tables",
    "torch": "ops cannot run: pip install 'kdagen[launch]'",
    "triton": "kernels cannot run or compile: pip install 'kdagen[launch]'", "numpy": "no interpreter",
}

Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    """(what, found, verdict), a line each."""
    yield "python", platform.python_version(), "ok" if sys.version_info >= (3, 10) else "needs 3.10 or newer"
    yield from _modules()
    target = devices.machine()
    yield ("GPU", f"{target.slug} ({target.arch}, {target.sms} SMs, {target.smem} B shared)" if target else "none",
           "ok" if target else "ops take the CPU path; TRITON_INTERPRET=1 interprets fp32 and fp16 kernels")
    cache = files.cache_dir()
    reason = refuse_folder(cache)
    yield "cache", str(cache), f"{reason}: set KDAGEN_CACHE to a folder that this user may write" if reason else "ok"
    yield from _settings()
    yield "generated/", *_generated()
    yield "dispatch digest", *_digest()


def _modules() -> Iterator[Row]:
    found = {}
    for name, without in MODULES.items():
        try:
            found[name] = importlib.import_module(name)
            yield name, importlib.metadata.version(name), "ok"
        except ImportError:
            yield name, "missing", without
    minor = {name: tuple(map(int, found[name].__version__.split(".")[:2])) for name in ("triton", "numpy") if name in found}
    if "triton" in minor:
        yield ("triton version", found["triton"].__version__,
               "ok" if (3, 6) <= minor["triton"] < (3, 10) else "tested with 3.6 to 3.9")
    if "numpy" in minor and minor.get("triton") == (3, 6):
        yield ("interpreter", f"numpy {found['numpy'].__version__}", "ok" if minor["numpy"] < (2, 4) else
               "Triton 3.6 cannot interpret loops with it: pip install 'numpy<2.4'")


def refuse_folder(folder: Path) -> str | None:
    """Why files cannot be made in a folder, which need not exist yet: tried with a temporary one in what there is of it."""
    where = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryDirectory(dir=where):
            return None
    except OSError as error:
        return f"cannot be written ({where}: {error.strerror})"


def _settings() -> Iterator[Row]:
    """The variables that are set, each with whether kdagen understands it."""
    checks: dict[str, Callable[[str], str]] = {
        "KDAGEN_MODE": lambda _: loader.mode() and "ok", "KDAGEN_PIN": _pins, "KDAGEN_VARIANT_PATH": _variant_path,
        "KDAGEN_BATCH_INVARIANT": lambda value: "set" if value in ("0", "1") else "1 turns it on: this does not",
        "TRITON_INTERPRET": lambda _: "set",
    }
    for name, check in checks.items():
        value = os.environ.get(name)
        if value:
            try:
                yield name, value, check(value)
            except KdagenError as error:
                yield name, value, str(error)


def _pins(value: str) -> str:
    """``ok``, or why a pin is refused: unknown, outside of its family's limits, or unfit for this machine's device."""
    target = devices.machine()
    for name, schedule in dispatch.environment_pins(value).items():
        spec = parse(name).spec
        reason = families.get(spec.family).supports(spec, schedule, None)
        reason = reason or (target and dispatch.unfit(spec, schedule, target))
        if reason:
            return f"{name}: {reason}"
    return "ok"


def _variant_path(_: str) -> str:
    """``ok``, or which of the folders holds no manifest that can be read."""
    wrong = []
    for folder in files.variant_dirs():
        if not folder.is_dir():
            wrong.append(f"{folder} is not a folder")
        elif not (folder / manifest.NAME).exists():
            wrong.append(f"{folder} has no {manifest.NAME}; fill it with `kdagen render ... --out {folder}`")
        else:
            manifest.read(folder)
    return "; ".join(wrong) or "ok"


def _generated() -> tuple[str, str]:
    try:
        errors = [finding for finding in project.check() if finding.error]
        return f"{len(project.committed_set())} variants", "run: kdagen check" if errors else "ok"
    except KdagenError as error:
        return "unreadable", str(error)


def _digest() -> tuple[str, str]:
    try:
        return dispatch.digest(), "compare it across ranks"
    except KdagenError as error:
        return "none", str(error)
