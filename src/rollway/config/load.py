"""A TOML file and `section.key=value` overrides in, a checked RunConfig out."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, did_you_mean
from .sections import RunConfig


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, apply `overrides` in order, refuse what is unknown, mistyped or out of range."""
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no run file at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _override(tree, override)
    return check(tree, source=str(path))


def check(tree: dict[str, Any], source: str) -> RunConfig:
    """Turn a parsed tree into a RunConfig, or say which key is wrong and what would be right."""
    _refuse_unknown(tree, msgspec.inspect.type_info(RunConfig), path="", source=source)
    try:
        return msgspec.convert(tree, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), tree)}") from None


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=value`; the value is TOML, and a bare word is a string."""
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    _place(tree, keys, value, override)


def _place(tree: Any, keys: list[str], value: Any, override: str) -> None:
    head, rest = keys[0], keys[1:]
    if isinstance(tree, list):
        if not head.isdigit() or int(head) >= len(tree):
            raise ConfigError(f"--set {override}: '{head}' is not an index from 0 to {len(tree) - 1}")
        index: Any = int(head)
    elif isinstance(tree, dict):
        index = head
        if rest:
            tree.setdefault(head, {})
    else:
        raise ConfigError(f"--set {override}: '{head}' lies below a plain value, not a section")
    if rest:
        _place(tree[index], rest, value, override)
    else:
        tree[index] = value


def _refuse_unknown(tree: Any, kind: msgspec.inspect.Type, path: str, source: str) -> None:
    """Walk the tree along the struct types; the first unknown key ends it."""
    match kind:
        case msgspec.inspect.StructType(fields=fields) if isinstance(tree, dict):
            known = {one.encode_name: one.type for one in fields}
            for key, value in tree.items():
                where = f"{path}{key}"
                if key not in known:
                    hint = did_you_mean(key, known)
                    allowed = f"allowed: {', '.join(known)}"
                    raise ConfigError(
                        f"{source}: unknown key '{where}' (value {value!r}){hint}; {allowed}"
                    )
                _refuse_unknown(value, known[key], f"{where}.", source)
        case msgspec.inspect.VarTupleType(item_type=item) if isinstance(tree, list):
            for index, value in enumerate(tree):
                _refuse_unknown(value, item, f"{path}{index}.", source)
        case msgspec.inspect.UnionType(types=types):
            for one in types:
                _refuse_unknown(tree, one, path, source)


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$")
_INDEX = re.compile(r"\[(\d+)\]")


def _explain(message: str, tree: dict[str, Any]) -> str:
    """Reword msgspec's message: the key's path, its value and what is allowed there."""
    found = _AT.match(message)
    assert found is not None
    what, where = found["what"], _INDEX.sub(r".\1", found["path"] or "").lstrip(".")
    missing = re.match(r"Object missing required field `(.+)`", what)
    if missing:
        return f"missing key '{where + '.' if where else ''}{missing[1]}'"
    value: Any = tree
    for key in where.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return f"'{where}' = {value!r}: {what[0].lower()}{what[1:]}"
