"""Tools: methods of a Toolset that the policy may call."""

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from ..errors import UNREADABLE, EnvironmentNotFound

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rollway_tool__"

Scope = Literal["rollout", "group", "worker"]


def tool(method: F) -> F:
    """Mark a method of a Toolset as a tool. Its name, docstring and type hints are what the policy sees.

    An `async def` runs on the worker's loop and shares the toolset's state. A plain function runs in a
    process of its own, with a deadline that kills, on its own unopened copy of the toolset.
    """
    setattr(method, _MARK, True)
    return method


class Toolset:
    """Tools that share a lifetime. Override `__aenter__` and `__aexit__` for what must be opened and
    closed."""

    scope: ClassVar[Scope] = "rollout"
    """Opened for each rollout, once for the rollouts of a group, or once in each worker."""
    errors: ClassVar[Literal["tell", "fail"]] = "tell"
    """What an exception in a tool does: the policy is told and may go on, or the rollout fails."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return None


class ToolSpec(Struct, frozen=True):
    """A tool as the policy sees it, and the type its arguments are read into."""

    name: str
    arguments: type[Struct]
    is_async: bool
    schema: dict[str, Any]
    """In the shape chat APIs use."""

    def read(self, arguments: str) -> dict[str, Any]:
        """Keyword arguments from the JSON that the policy wrote; ValueError says what is wrong."""
        try:
            read = msgspec.json.decode(arguments or "{}", type=self.arguments, strict=False)
        except (UnicodeError, *UNREADABLE) as error:
            raise ValueError(f"arguments of {self.name}: {error}") from None
        return {name: getattr(read, name) for name in self.arguments.__struct_fields__}


_known: dict[type[Toolset], tuple[ToolSpec, ...]] = {}


def tool_specs(kind: type[Toolset]) -> tuple[ToolSpec, ...]:
    """The tools of a class, in the order they are written, base classes first. Read once."""
    if kind not in _known:
        names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
        methods = {name: getattr(kind, name) for name in names}
        marked = {name: one for name, one in methods.items() if hasattr(one, _MARK)}
        _known[kind] = tuple(_spec(kind, name, one) for name, one in marked.items())
    return _known[kind]


def _spec(kind: type[Toolset], name: str, method: Callable[..., Any]) -> ToolSpec:
    origin = f"tool {kind.__name__}.{name}"
    try:
        hints = get_type_hints(method, include_extras=True)
    except Exception as error:  # hints may be code in quotes
        raise EnvironmentNotFound(f"{origin}: its type hints cannot be read: {error}") from None
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentNotFound(f"{origin}: '*{parameter.name}' has no schema; name each argument")
        if parameter.name not in hints:
            raise EnvironmentNotFound(f"{origin}: argument '{parameter.name}' needs a type hint")
        field = (parameter.name, hints[parameter.name])
        fields.append(field if parameter.default is parameter.empty else (*field, parameter.default))
    arguments = msgspec.defstruct(name, fields, frozen=True, forbid_unknown_fields=True, kw_only=True)
    try:
        schema = _schema(name, inspect.getdoc(method) or "", arguments)
    except TypeError as error:
        raise EnvironmentNotFound(f"{origin}: {error}") from None
    return ToolSpec(name, arguments, inspect.iscoroutinefunction(method), schema)


def _schema(name: str, description: str, arguments: type[Struct]) -> dict[str, Any]:
    (_,), parts = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = parts.pop(arguments.__name__)
    parameters = {"type": "object", "properties": own["properties"], "required": own["required"]}
    if parts:
        parameters["$defs"] = parts
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def as_text(result: Any) -> str:
    """A tool's result as the policy reads it: text as it is, the rest as JSON."""
    if result is None:
        return ""
    return result if isinstance(result, str) else msgspec.json.encode(result).decode()
