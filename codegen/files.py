"""Where files live, and the only way they are written: whole, atomically, and only when the bytes differ."""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path


def package_dir(package: str) -> Path:
    """The folder of ``kdagen.templates`` or ``kdagen.generated``, in an editable install and in a wheel."""
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations)))


def templates_dir() -> Path:
    return package_dir("kdagen.templates")


def generated_dir() -> Path:
    return package_dir("kdagen.generated")


def cache_dir() -> Path:
    """The user's folder for variants rendered on demand; KDAGEN_CACHE overrides it."""
    root = os.environ.get("KDAGEN_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdagen"


def variant_dirs() -> list[Path]:
    """The folders of KDAGEN_VARIANT_PATH, in order."""
    return [Path(part) for part in os.environ.get("KDAGEN_VARIANT_PATH", "").split(os.pathsep) if part]


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def write_if_different(path: Path, text: str) -> bool:
    """Replace ``path`` by ``text`` in one step; False if it already held those bytes."""
    data = text.encode()
    try:
        if path.read_bytes() == data:
            return False
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return True
