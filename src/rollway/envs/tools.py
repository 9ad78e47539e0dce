"""Tools: methods of a Toolset that the policy may call."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, get_type_hints

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE, EnvironmentInvalid
from .marks import Method, MethodMarks

Scope = Literal["rollout", "group", "worker"]


class ToolSpec(Struct, frozen=True):
    """A tool as the policy sees it, and the type that its arguments are decoded into."""

    name: str
    arguments: type[Struct]
    is_async: bool
    schema: dict[str, Any]
    """The tool's description, in the shape that chat APIs use."""

    def read(self, arguments: str) -> dict[str, Any]:
        """Decode the policy's JSON into keyword arguments; ValueError says what is wrong."""
        try:
            decoded = msgspec.json.decode(
                arguments or "{}", type=self.arguments, strict=False
            )
        except (UnicodeError, *UNREADABLE) as error:
            raise ValueError(f"the arguments of {self.name} are wrong: {error}") from None
        return {name: getattr(decoded, name) for name in self.arguments.__struct_fields__}


_TOOLS: MethodMarks[Callable[[], ToolSpec]] = MethodMarks("tool")
"""A note builds the tool's specification on first use: only then can all type hints be resolved."""


def tool(method: Method) -> Method:
    """Mark a method of a Toolset as a tool. The policy sees its name, docstring and type hints.

    An `async def` runs on the worker's event loop and shares the toolset's state. A plain `def` runs in
    another process, on that process's unopened copy of the toolset, and is killed at its deadline.
    """
    return _TOOLS.add(method, cache(partial(_read_spec, method)))


class Toolset:
    """Tools that share a lifetime. `__aenter__` and `__aexit__` may open and close what they need."""

    scope: ClassVar[Scope] = "rollout"
    """When the toolset is opened: for each rollout, for each group, or once in each worker."""
    errors: ClassVar[Literal["tell", "fail"]] = "tell"
    """The effect of an exception in a tool: `tell` shows it to the policy, `fail` fails the rollout."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        return None


def tool_specs(toolset_class: type[Toolset]) -> tuple[ToolSpec, ...]:
    """Return the tools of a class, base classes first, in the order they are written."""
    return tuple(read_spec() for read_spec in _TOOLS.of(toolset_class).values())


def _read_spec(method: Callable[..., Any]) -> ToolSpec:
    name = method.__name__
    try:
        fields = list(_fields(method))
        arguments = msgspec.defstruct(
            name, fields, frozen=True, forbid_unknown_fields=True, kw_only=True
        )
        schema = _schema(name, inspect.getdoc(method) or "", arguments)
    except TypeError as error:
        origin = method.__qualname__.rpartition("<locals>.")[2]
        raise EnvironmentInvalid(f"tool {origin}: {error}") from None
    return ToolSpec(name, arguments, inspect.iscoroutinefunction(method), schema)


def _fields(method: Callable[..., Any]) -> Iterator[Any]:
    """Yield each argument's name, type and default, if it has one; TypeError says what is wrong."""
    try:
        hints = get_type_hints(method, include_extras=True)
    except Exception as error:  # hints may be code in quotes
        raise TypeError(f"its type hints cannot be read: {error}") from None
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters:
        raise TypeError("its first argument must be 'self'")
    for parameter in parameters[1:]:
        name, default = parameter.name, parameter.default
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"'*{name}' cannot be described to the policy; name each argument"
            )
        if name not in hints:
            raise TypeError(f"argument '{name}' needs a type hint")
        field = (name, hints[name])
        yield field if default is parameter.empty else (*field, default)


def _schema(name: str, description: str, arguments: type[Struct]) -> dict[str, Any]:
    template = "#/$defs/{name}"
    _, definitions = msgspec.json.schema_components([arguments], ref_template=template)
    own = definitions.pop(arguments.__name__)
    parameters = {key: own[key] for key in ("type", "properties", "required")}
    if definitions:
        parameters["$defs"] = definitions
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def as_text(result: Any) -> str:
    """Return a tool's result as the policy reads it: a string unchanged, everything else as JSON."""
    if isinstance(result, str):
        return result
    return "" if result is None else msgspec.json.encode(result).decode()
