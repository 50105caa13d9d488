"""Spec is meaning, Schedule is speed; their names and the round trip between name and value.

A variant's name is ``family__spec tokens__block tokens``: ``prefill_state__c64_k128_v128_bf16__bv64``. Flags appear only
when they differ from the family's default. This module is pure Python and imports nothing but the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kdagen.errors import UnknownName, Unsupported, refuse

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8}  # name -> bytes an element
CHUNKS = (16, 32, 64, 128)

FlagValue = bool | int | str


@dataclass(frozen=True, order=True)
class Spec:
    """What a variant computes. Matched exactly or refused; never approximated.

    ``chunk``, ``k`` and ``v`` are 0 in families that have no such dimension. ``flags`` is a sorted tuple of
    (name, value) pairs of the family's own flags, without those at their default.
    """

    family: str
    chunk: int = 0
    k: int = 0
    v: int = 0
    dtype: str = ""
    flags: tuple[tuple[str, FlagValue], ...] = ()

    @classmethod
    def make(cls, family: str, *, chunk: int = 0, k: int = 0, v: int = 0, dtype: str = "", **flags: FlagValue) -> Spec:
        """Build a Spec, checking dtype and flags against the family; flags at their default are dropped."""
        from kdagen.families import get

        declared = get(family).flags
        if dtype and dtype not in DTYPES:
            refuse("dtype", repr(dtype), f"one of {', '.join(DTYPES)}", kind=Unsupported)
        kept = []
        for name, value in sorted(flags.items()):
            if name not in declared:
                refuse(f"flag {name!r}", repr(value), f"a flag of family {family}: {', '.join(declared) or 'none'}",
                       kind=Unsupported)
            declared[name].check(value)
            if value != declared[name].default:
                kept.append((name, value))
        return cls(family, chunk, k, v, dtype, tuple(kept))

    def __getattr__(self, name: str) -> FlagValue:
        """``spec.gate`` reads a flag, or its default; what templates and families use."""
        if name.startswith("__"):
            raise AttributeError(name)
        for flag, value in object.__getattribute__(self, "flags"):
            if flag == name:
                return value
        from kdagen.families import get

        declared = get(object.__getattribute__(self, "family")).flags
        if name in declared:
            return declared[name].default
        raise AttributeError(f"family {self.family} has no flag {name!r}")

    @property
    def name(self) -> str:
        """``family__tokens``: the part of a variant's name that says what it computes."""
        from kdagen.families import get

        tokens = [f"{letter}{size}" for letter, size in (("c", self.chunk), ("k", self.k), ("v", self.v)) if size]
        if self.dtype:
            tokens.append(self.dtype)
        declared = get(self.family).flags
        tokens += [declared[flag].token(value) for flag, value in self.flags]
        return f"{self.family}__{'_'.join(tokens)}"

    @property
    def literal(self) -> dict:
        """The Spec as the dictionary that a generated file carries."""
        sizes = {"chunk": self.chunk, "k": self.k, "v": self.v, "dtype": self.dtype}
        return {"family": self.family} | {n: s for n, s in sizes.items() if s} | dict(self.flags)

    @classmethod
    def of_literal(cls, literal: dict) -> Spec:
        return cls.make(**literal)


@dataclass(frozen=True, order=True)
class Flag:
    """One flag of a family: its allowed values, the first of them the default.

    A bool shows in names as the flag's name; a string as its own value; an integer as ``prefix`` + number.
    """

    name: str
    values: tuple[FlagValue, ...]
    prefix: str = ""

    @property
    def default(self) -> FlagValue:
        return self.values[0]

    def check(self, value: FlagValue) -> None:
        if not any(value == known and type(value) is type(known) for known in self.values):
            refuse(f"flag {self.name!r}", repr(value), f"one of {', '.join(map(repr, self.values))}", kind=Unsupported)

    def token(self, value: FlagValue) -> str:
        if isinstance(value, bool):
            return self.name.replace("_", "")
        return f"{self.prefix}{value}" if isinstance(value, int) else value


@dataclass(frozen=True, order=True)
class Schedule:
    """How fast a variant computes it: blocks and form are baked into the source, warps and stages are launch options."""

    blocks: tuple[tuple[str, int], ...] = ()
    warps: int = 4
    stages: int = 1
    form: str = ""  # "" is the portable form; others name a template of the same family (gluon, tma)

    @classmethod
    def make(cls, *, warps: int = 4, stages: int = 1, form: str = "", **blocks: int) -> Schedule:
        return cls(tuple(sorted(blocks.items())), warps, stages, form)

    @property
    def block(self) -> dict[str, int]:
        return dict(self.blocks)

    @property
    def source_key(self) -> Schedule:
        """The part that decides the source: two schedules with equal keys share one file."""
        return replace(self, warps=0, stages=0)

    @property
    def name(self) -> str:
        tokens = ([self.form] if self.form else []) + [f"{block}{size}" for block, size in self.blocks]
        return "_".join(tokens)

    @property
    def literal(self) -> dict:
        return ({"form": self.form} if self.form else {}) | dict(self.blocks)


class Problem(NamedTuple):
    """Run-time sizes: used to look a schedule up, never to decide what is computed."""

    tokens: int
    seqs: int
    heads: int


class Target(NamedTuple):
    """A device as the toolkit sees it. ``arch`` is sm90 or gfx942; ``slug`` names the product."""

    arch: str
    slug: str
    sms: int
    smem: int  # bytes of shared memory one program may have

    @property
    def vendor(self) -> str:
        return "cuda" if self.arch.startswith("sm") else "hip"


@dataclass(frozen=True, order=True)
class Variant:
    """A Spec with the baked part of a Schedule: one file under generated/."""

    spec: Spec
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def name(self) -> str:
        blocks = self.schedule.name
        return f"{self.spec.name}__{blocks}" if blocks else self.spec.name

    @property
    def path(self) -> str:
        """The file's path below generated/: ``family/variant.py``."""
        return f"{self.spec.family}/{self.name}.py"


_SIZE = re.compile(r"^([a-z]+)(\d+)$")


def parse(name: str) -> Variant:
    """The Variant that a name stands for; the inverse of ``Variant.name``."""
    from kdagen.families import get

    parts = name.split("__")
    if len(parts) not in (2, 3) or not all(parts):
        refuse("variant", repr(name), "family__spec__blocks, as `kdagen list` prints it", kind=UnknownName)
    family = get(parts[0])
    sizes: dict = {}
    flags: dict = {}
    flag_tokens = {flag.token(value): (flag.name, value)
                   for flag in family.flags.values() for value in flag.values if value is not False}
    letters = {"c": "chunk", "k": "k", "v": "v"}
    for token in parts[1].split("_"):
        size = _SIZE.match(token)
        if token in flag_tokens:
            flag, value = flag_tokens[token]
            flags[flag] = value
        elif token in DTYPES:
            sizes["dtype"] = token
        elif size and size[1] in letters:
            sizes[letters[size[1]]] = int(size[2])
        else:
            refuse(f"token {token!r} of {name}", repr(token), f"a size, a dtype or a flag of family {family.name}",
                   "Run `kdagen list` for the names there are.", kind=UnknownName)
    form, blocks = "", {}
    for token in parts[2].split("_") if len(parts) == 3 else ():
        size = _SIZE.match(token)
        if token in family.forms and token:
            form = token
        elif size:
            blocks[size[1]] = int(size[2])
        else:
            refuse(f"token {token!r} of {name}", repr(token), f"a block (bv64) or a form ({', '.join(family.forms)})",
                   kind=UnknownName)
    variant = Variant(Spec.make(family.name, **sizes, **flags), Schedule.make(warps=0, stages=0, form=form, **blocks))
    if variant.name != name:
        refuse("variant", repr(name), f"the canonical name {variant.name}", kind=UnknownName)
    return variant
