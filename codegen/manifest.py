"""generated/MANIFEST.json: which files are under generated/, what they were made from, and their hashes."""

from __future__ import annotations

import json
from pathlib import Path

from kdagen import files
from kdagen.errors import CorruptFile, refuse
from kdagen.render import Rendered
from kdagen.spec import Variant

NAME = "MANIFEST.json"
_FORMAT = 1


def entry(variant: Variant, rendered: Rendered) -> dict:
    return {"path": variant.path, "inputs": rendered.inputs, "sha256": files.digest(rendered.text)}


def read(folder: Path) -> dict[str, dict]:
    """Variant name -> entry; empty when the folder has no manifest, CorruptFile when it cannot be read."""
    path = folder / NAME
    try:
        data = json.loads(path.read_text())
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        variants = data["variants"]
        if not all(set(e) == {"path", "inputs", "sha256"} for e in variants.values()):
            raise ValueError("an entry without path, inputs and sha256")
        return variants
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(str(path), f"{type(error).__name__}: {error}", f"a manifest of format {_FORMAT}",
               "Run `kdagen render` to write it anew.", kind=CorruptFile)


def write(folder: Path, variants: dict[str, dict]) -> bool:
    text = json.dumps({"format": _FORMAT, "variants": dict(sorted(variants.items()))}, indent=1) + "\n"
    return files.write_if_different(folder / NAME, text)
