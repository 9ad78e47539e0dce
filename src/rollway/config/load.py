"""A TOML file and `section.key=value` overrides in, a checked RunConfig out."""

import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from ..errors import ConfigError, did_you_mean
from .credentials import hide_credentials, without_credentials
from .sections import RunConfig, TrainerConfig


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path` and apply `overrides`; refuse what is unknown, mistyped or out of range."""
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
    _refuse_unknown(tree, inspect.type_info(RunConfig), "", source)
    try:
        config = msgspec.convert(tree, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), tree)}") from None
    _refuse_both_variants(config, source)
    return _with_default_variants(_without_passwords(config))


def _without_passwords(config: RunConfig) -> RunConfig:
    """Keep passwords in URLs apart from the config, which is written down and shown."""
    external, replace = config.engine.external, msgspec.structs.replace
    if external is None:
        return config
    url: Any = external.url
    hidden = (
        without_credentials(url)
        if isinstance(url, str)
        else tuple(map(without_credentials, url))
    )
    return replace(
        config, engine=replace(config.engine, external=replace(external, url=hidden))
    )


def _refuse_both_variants(config: RunConfig, source: str) -> None:
    engine = config.engine
    pairs: list[tuple[str, object, str, object]] = [
        ("trainer", config.trainer, "external_trainer", config.external_trainer),
        ("engine.embedded", engine.embedded, "engine.external", engine.external),
        ("engine.vllm", engine.vllm, "engine.external", engine.external),
    ]
    if engine.embedded and engine.vllm:
        raise ConfigError(
            f"{source}: the run has both 'engine.embedded' and 'engine.vllm': remove one of the two"
        )
    for started_key, started, external_key, external in pairs:
        if started and external:
            raise ConfigError(
                f"{source}: the run has both '{started_key}' and '{external_key}': rollway starts the "
                "first and only connects to the second; remove one of the two"
            )


def _with_default_variants(config: RunConfig) -> RunConfig:
    """Name what the run starts where the file does not say, so that `--dry-run` shows all keys."""
    engine, replace = config.engine, msgspec.structs.replace
    return replace(
        config,
        engine=replace(engine, embedded=engine.local) if engine.is_embedded else engine,
        trainer=config.trainer or (None if config.external_trainer else TrainerConfig()),
        env=tuple(
            env if env.external else replace(env, server=env.local) for env in config.env
        ),
    )


def _override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=value`. The value is TOML; a bare word is a string."""
    key, equals, text = override.partition("=")
    keys, shown = key.strip().split("."), hide_credentials(override)
    if not equals or not all(keys):
        raise ConfigError(f"--set {shown}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    is_free = "args" in keys or "template" in keys
    if is_free and isinstance(value, float) and not math.isfinite(value):
        value = text  # the word nan or inf: a number that is not one is hardly meant
    _place(tree, keys, value, shown)
    _choose_variant(tree, keys)


def _choose_variant(tree: dict[str, Any], keys: list[str]) -> None:
    """Remove the other variant: `--set engine.external.url=…` wins over a file's `[engine.embedded]`."""
    match keys:
        case ["trainer", *_]:
            tree.pop("external_trainer", None)
        case ["external_trainer", *_]:
            tree.pop("trainer", None)
        case ["engine", "embedded" | "vllm" | "external" as variant, *_]:
            for other in {"embedded", "vllm", "external"} - {variant}:
                tree["engine"].pop(other, None)


def _place(tree: Any, keys: list[str], value: Any, shown: str) -> None:
    head, rest = keys[0], keys[1:]
    if isinstance(tree, list):
        if not head.isdigit() or int(head) >= len(tree):
            raise ConfigError(
                f"--set {shown}: '{head}' is not an index from 0 to {len(tree) - 1}"
            )
        index: Any = int(head)
    elif isinstance(tree, dict):
        index = head
        if rest:
            tree.setdefault(head, {})
    else:
        raise ConfigError(f"--set {shown}: '{head}' lies below a plain value, not a section")
    if rest:
        _place(tree[index], rest, value, shown)
    else:
        tree[index] = value


def _refuse_unknown(tree: Any, kind: inspect.Type, path: str, source: str) -> None:
    """Walk the tree along the types of its sections, and raise for the first unknown key."""
    match kind:
        case inspect.StructType(fields=fields) if isinstance(tree, dict):
            known = {field.encode_name: field.type for field in fields}
            for key, value in tree.items():
                where = f"{path}{key}"
                if key not in known:
                    hint, allowed = _hint(key, known, path), ", ".join(known)
                    raise ConfigError(
                        f"{source}: unknown key '{where}' (value {_shown(value)}){hint}; "
                        f"allowed: {allowed}"
                    )
                _refuse_unknown(value, known[key], f"{where}.", source)
        case inspect.VarTupleType(item_type=item) if isinstance(tree, list):
            for index, value in enumerate(tree):
                _refuse_unknown(value, item, f"{path}{index}.", source)
        case inspect.UnionType(types=types):
            for member in types:
                _refuse_unknown(tree, member, path, source)


def _hint(key: str, known: dict[str, inspect.Type], path: str) -> str:
    """Name the key that was probably meant: the same key one section deeper, or one of this section."""
    for name, kind in known.items():
        for member in getattr(kind, "types", (kind,)):
            if key in {field.encode_name for field in getattr(member, "fields", ())}:
                return f"; did you mean '{path}{name}.{key}'?"
    return did_you_mean(key, known)


_INDEX = re.compile(r"\[(\d+)\]")


def _explain(message: str, tree: dict[str, Any]) -> str:
    """Reword msgspec's message: the key's path, its value and what is allowed there."""
    what, _, path = message.partition(" - at `$")
    where = _INDEX.sub(r".\1", path.rstrip("`")).lstrip(".")
    if missing := re.match(r"Object missing required field `(.+)`", what):
        return f"missing key '{where + '.' if where else ''}{missing[1]}'"
    value: Any = tree
    for key in where.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    text = in_words(what)
    if "matching regex" in what:
        text = "expected letters, digits, '.', '_' and '-', a letter or digit first"
    if what.startswith("Invalid enum value"):
        choices = _choices(where.split("."), inspect.type_info(RunConfig))
        hint = did_you_mean(str(value), choices)
        text = f"expected one of {', '.join(map(repr, choices))}{hint}"
    return f"'{where}' = {_shown(value)}: {text}"


def _shown(value: Any) -> str:
    """Return a value as errors show it: a URL in the wrong place may have a password, too."""
    return hide_credentials(repr(value))


def _choices(keys: list[str], kind: inspect.Type) -> list[str]:
    """Return the words that the key at the end of this path may have."""
    match kind:
        case inspect.LiteralType(values=values):
            return [str(value) for value in values]
        case inspect.UnionType(types=types):
            return [choice for member in types for choice in _choices(keys, member)]
        case inspect.VarTupleType(item_type=item) if keys:
            return _choices(keys[1:], item)
        case inspect.StructType(fields=fields) if keys:
            known = {field.encode_name: field.type for field in fields}
            return _choices(keys[1:], known[keys[0]]) if keys[0] in known else []
    return []


_TYPES = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
    "array": "a list", "object": "a section",
}  # fmt: skip
_BOUNDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


def in_words(message: str) -> str:
    """Say what msgspec expected in the words of docs/configuration.md: `int` >= 1 is a whole number, at
    least 1."""
    match = re.fullmatch(r"Expected `([^`]+)`(?: (.*?))?(?:, got `([^`]+)`)?", message)
    if match is None:
        return f"{message[0].lower()}{message[1:]}"
    kinds = [_TYPES.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
    text = f"expected {' or '.join(dict.fromkeys(kinds))}"
    if bound := re.fullmatch(r"(?:of length )?([<>]=?) (\S+)", match[2] or ""):
        unit = " entries" if "length" in match[2] else ""
        text += f", {_BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}{unit}"
    elif match[2]:
        text += f" {match[2]}"
    return f"{text}, got {_TYPES.get(match[3], match[3])}" if match[3] else text
