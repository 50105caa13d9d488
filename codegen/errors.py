"""What kdagen raises: every message names the argument, what came, what was expected, and the next command.

The children inherit from the built-in that a Python user would expect, so ``except ValueError`` works.
"""


class KdagenError(Exception):
    """Base of all refusals. ``str(error)`` is the whole message; there is nothing else to look up."""


class ArgumentError(KdagenError, ValueError):
    """A value, shape or boundary that the op cannot take."""


class ArgumentTypeError(KdagenError, TypeError):
    """A dtype, a device or a keyword that the op does not know."""


class UnknownName(KdagenError, LookupError):
    """A family, variant, device or target that does not exist."""


class Unsupported(KdagenError, ValueError):
    """A Spec or Schedule outside a family's limits, or one that does not fit the device."""


class NoVariant(KdagenError, LookupError):
    """Strict mode met a Spec that was never rendered."""


class RenderError(KdagenError):
    """A template failed; the message names the template and its line."""


class CompileError(KdagenError):
    """Triton or ptxas refused a rendered kernel; the message names template:line and generated:line."""


class CorruptFile(KdagenError):
    """A manifest, tuned table or cached module whose bytes are not what they should be."""


def refuse(argument: str, came: object, expected: str, hint: str = "", *, kind: type[KdagenError] = ArgumentError):
    """Raise ``kind`` with the house's message: argument, what came, what was expected, what to do next."""
    message = f"{argument}: got {came}, expected {expected}"
    raise kind(f"{message}. {hint}" if hint else message)
