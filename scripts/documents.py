"""The marked parts of documents: replaced whole, and every change told."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click

from kdagen import files


def marked(text: str, name: str, made: str) -> str:
    """The text with what stands between ``<!-- name -->`` and ``<!-- /name -->`` replaced."""
    block = f"<!-- {name} -->\n{made}\n<!-- /{name} -->"
    return re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.S)


def put(document: Path, text: str, *, check: bool, command: str) -> bool:
    """Make the document this text, and say whether that changed it. With ``check`` write nothing and print the lines that
    differ, with the ``command`` that mends them. True if it differed."""
    before = document.read_text()
    if not check:
        changed = files.write_if_different(document, text)
        click.echo(f"{'wrote the tables of' if changed else 'unchanged:'} {document}")
        return changed
    lines = difflib.unified_diff(before.splitlines(), text.splitlines(), f"{document} (on disk)", f"{document} (the JSON)",
                                 lineterm="", n=0)
    for line in lines:
        click.echo(line, err=True)
    if before != text:
        click.echo(f"{document}: a table is not what the JSON says. Run: {command}", err=True)
    else:
        click.echo(f"up to date: {document}")
    return before != text
