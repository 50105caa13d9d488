"""From a Variant to the text of its module: the Jinja environment, the header, the source map.

Templates see ``spec``, ``schedule``, ``blocks`` (a dict), what the family's ``context`` adds, and the globals below.
Control flow is written as line statements, ``#% if spec.gate == "bounded"``, so that a template still reads as Python.
"""

from __future__ import annotations

import json
import math
import pprint
import re
import traceback
from functools import cache, lru_cache
from typing import NamedTuple

import jinja2
from jinja2 import meta
from jinja2.ext import Extension
from jinja2.lexer import Token

from kdagen import families, files
from kdagen.errors import RenderError, Unsupported, refuse
from kdagen.families.base import next_power_of_2
from kdagen.spec import Variant

TRITON_DTYPES = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32", "i32": "tl.int32", "i64": "tl.int64"}
HEADER_LINES = 5
_MARK = re.compile("\x01([^\x01:]+):(\\d+)\x02")


class Rendered(NamedTuple):
    """A module's text, the hash of what it was made from, and for each line (template, line)."""

    text: str
    inputs: str
    source_map: tuple[tuple[str, int], ...]


class _MarkLines(Extension):
    """Puts ``\\x01template:line\\x02`` before each line of template text; the environment for source maps only."""

    def filter_stream(self, stream):
        for token in stream:
            if token.type == "data":
                parts = token.value.split("\n")
                marked = [f"\x01{stream.name}:{token.lineno + i}\x02{part}" if part or i < len(parts) - 1 else part
                          for i, part in enumerate(parts)]
                token = Token(token.lineno, "data", "\n".join(marked))
            yield token


@cache
def _environment(marked: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(files.templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        line_statement_prefix="#%",
        autoescape=False,
        extensions=[_MarkLines] if marked else [],
    )
    environment.globals |= {
        "LOG2E": repr(math.log2(math.e)),
        "triton_dtype": TRITON_DTYPES,
        "next_power_of_2": next_power_of_2,
        "cdiv": lambda a, b: -(-a // b),
        "log2": lambda n: n.bit_length() - 1,
    }
    environment.filters["literal"] = lambda value: pprint.pformat(value, sort_dicts=False, width=112)
    return environment


@cache
def template_sources(template: str) -> tuple[tuple[str, str], ...]:
    """(name, text) of a template and of everything it includes or imports, in name order."""
    environment, found, todo = _environment(False), {}, [template]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            found[name] = environment.loader.get_source(environment, name)[0]
            todo += [n for n in meta.find_referenced_templates(environment.parse(found[name])) if n]
        except jinja2.TemplateNotFound as error:
            raise RenderError(f"template: templates/{error.name} does not exist") from None
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"templates/{name}:{error.lineno}: {error.message}") from None
    return tuple(sorted(found.items()))


def inputs_hash(variant: Variant) -> str:
    """The hash of all that decides a variant's bytes: its templates, Spec and baked schedule."""
    template = families.get(variant.spec.family).template(variant.schedule)
    return _inputs_hash(variant.spec, variant.schedule.source_key, template)


@lru_cache(maxsize=4096)
def _inputs_hash(spec, schedule, template: str) -> str:
    parts = [template_sources(template), spec.literal, schedule.literal, "header 1"]
    return files.digest(json.dumps(parts, sort_keys=True))


def header(variant: Variant, template: str, inputs: str) -> str:
    """The fixed-height comment on top of each generated file (Triton's cache keys hold a kernel's starting line)."""
    return (
        "# Rendered by kdagen: edit the template and run `kdagen render`, not this file.\n"
        f"# template: {template}\n"
        f"# variant:  {variant.name}\n"
        f"# inputs:   {inputs}\n"
        "\n"
    )


def check_supported(variant: Variant) -> None:
    """Refuse a variant that its family cannot compute on any target."""
    family = families.get(variant.spec.family)
    reason = family.supports(variant.spec, variant.schedule, None)
    if reason:
        refuse(f"variant {variant.name}", reason, f"a Spec and blocks that family {family.name} supports",
               f"Limits: docs/limits.md, and supports of codegen/families/{family.name}.py", kind=Unsupported)


@lru_cache(maxsize=1024)
def render(variant: Variant, *, source_map: bool = False) -> Rendered:
    """The module's text. With ``source_map`` also (template, line) of every line; both come from the same bytes."""
    check_supported(variant)
    family = families.get(variant.spec.family)
    template = family.template(variant.schedule)
    inputs = inputs_hash(variant)
    names = {
        "spec": variant.spec,
        "schedule": variant.schedule,
        "blocks": variant.schedule.block,
        "variant": variant.name,
        "defaults": family.default(variant.spec),
    } | family.context(variant.spec, variant.schedule)
    top = header(variant, template, inputs)
    text = _tidy(top + _run(template, names, marked=False))
    if not source_map:
        return Rendered(text, inputs, ())
    marked = _tidy(top + _run(template, names, marked=True))
    lines, where = [], (template, 1)
    for line in marked.splitlines():
        marks = _MARK.findall(line)
        if marks:
            where = (marks[0][0], int(marks[0][1]))
        lines.append(where)
    assert _MARK.sub("", marked) == text, "the marked rendering differs from the plain one"
    return Rendered(text, inputs, tuple(lines))


def _run(template: str, names: dict, *, marked: bool) -> str:
    try:
        return _environment(marked).get_template(template).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"templates/{error.name}:{error.lineno}: {error.message}") from None
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"template: templates/{error.name} does not exist") from None
    except Exception as error:  # an error of any kind inside a template: say where, keep the cause
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(".j2")]
        where = f"templates/{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else template
        raise RenderError(f"{where}: {error}") from error


def _tidy(text: str) -> str:
    """At most two blank lines in a row, no spaces at line ends, one newline at the end."""
    out: list[str] = []
    blank = 0
    for line in text.split("\n"):
        line = line.rstrip()
        empty = not _MARK.sub("", line).strip()
        blank = blank + 1 if empty else 0
        if blank <= 2:
            out.append(line.rstrip() if not empty else _MARK.match(line)[0] if _MARK.match(line) else "")
    while out and not _MARK.sub("", out[-1]):
        out.pop()
    return "\n".join(out) + "\n"


def locate(variant: Variant, line: int) -> str:
    """``templates/x.py.j2:47`` for a line of the generated module: what compile errors print."""
    source_map = render(variant, source_map=True).source_map
    template, template_line = source_map[min(line, len(source_map)) - 1]
    return f"templates/{template}:{template_line}"
