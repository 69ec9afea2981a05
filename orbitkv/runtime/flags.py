"""Flags: command line and configuration file of a settings class, derived from its fields.

A field is a flag by itself, in its docstring's words; what a value may be, the class says.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, Union

from orbitkv.config import format_nbytes, parse_nbytes
from orbitkv.errors import ConfigError

T = TypeVar("T")

# Where a flag is not its field's name less the unit of bytes.
_NAMES = {"pool_nbytes": "pool-size", "ssd_cache_paths": "ssd-cache-path"}
_ALIASES = {"socket": ("--addr",)}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a settings class, as people write it.

    Attributes:
        field: Its name in the class.
        flag: ``--pool-size``; in a file the key is ``pool_size``.
        accepted: Type of a value, None aside.
        several: The value is a tuple of these.
    """

    field: str
    flag: str
    accepted: Any
    several: bool
    default: Any
    help: str

    @property
    def key(self) -> str:
        """The key in a file."""
        return self.flag.removeprefix("--").replace("-", "_")

    def parse(self, value: Any) -> Any:  # noqa: ANN401 - of a command line or of TOML
        """Turn text, or a value of TOML, into the field's.

        Raises:
            ConfigError: naming the flag, what was seen, and what is accepted.
        """
        if self.several:
            values = value if isinstance(value, list) else [value]
            return tuple(self._parse_one(one) for one in values)
        return self._parse_one(value)

    def _parse_one(self, value: Any) -> Any:  # noqa: ANN401 - as above
        if self.field.endswith("_nbytes"):
            return parse_nbytes(value, setting=self.flag)
        if self.accepted is bool:
            return self._checked(value, isinstance(value, bool), "true or false")
        if self.accepted in (int, float):
            return self._number(value)
        self._checked(value, isinstance(value, str), "text")
        return Path(value) if self.accepted is Path else value

    def _number(self, value: Any) -> float:  # noqa: ANN401 - as above
        what = "a whole number" if self.accepted is int else "a number"
        whole = isinstance(value, str | int) and not isinstance(value, bool)
        self._checked(value, whole or (self.accepted is float and isinstance(value, float)), what)
        try:
            number: float = self.accepted(value)
        except ValueError:
            raise ConfigError(f"{self.flag}: {value!r}; accepted: {what}") from None
        return number

    def _checked(self, value: Any, stands: bool, accepted: str) -> Any:  # noqa: ANN401, FBT001
        if not stands:
            raise ConfigError(f"{self.flag}: {value!r}; accepted: {accepted}")
        return value


def settings_of(described: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(described)
    helps = _attributes(inspect.getdoc(described) or "")
    found = []
    for field in dataclasses.fields(described):
        hint, several = hints[field.name], False
        if typing.get_origin(hint) in (Union, types.UnionType):
            kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            hint = str if str in kinds else kinds[0]
        if typing.get_origin(hint) is tuple:
            hint, several = typing.get_args(hint)[0], True
        name = _NAMES.get(field.name, field.name.removesuffix("_nbytes")).replace("_", "-")
        text = helps.get(field.name, "")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(Setting(field.name, f"--{name}", hint, several, default, text))
    return tuple(found)


def add_flags(
    group: argparse._ArgumentGroup,
    settings: Sequence[Setting],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add a flag for each setting; one that is not given is not in the result.

    Args:
        defaults: By field, where they are not those of the class.
    """
    for setting in settings:
        default = defaults.get(setting.field, setting.default)
        text = f"{_for_users(setting.help)} (default: {_shown_to_users(setting, default)})"
        options: dict[str, Any] = {
            "dest": setting.field,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        if setting.accepted is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            if typing.get_origin(setting.accepted) is Literal:
                options["metavar"] = "|".join(map(str, typing.get_args(setting.accepted)))
            else:
                options["metavar"] = "SIZE" if setting.field.endswith("_nbytes") else "VALUE"
            if setting.several:
                options["action"] = "append"
        group.add_argument(setting.flag, *_ALIASES.get(setting.field, ()), **options)


def read_file(path: Path, settings: Sequence[Setting]) -> dict[str, Any]:
    """Read a configuration file: values by field, parsed.

    Raises:
        ConfigError: it cannot be read, or with every key that is unknown.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config: {path}: {error}; accepted: a TOML file") from error
    keys = {setting.key: setting for setting in settings}
    if unknown := sorted(read.keys() - keys.keys()):
        raise ConfigError(f"{path}: unknown {', '.join(unknown)}; accepted: {', '.join(keys)}")
    try:
        return {keys[key].field: keys[key].parse(value) for key, value in read.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def build(described: type[T], settings: Sequence[Setting], values: Mapping[str, Any]) -> T:
    """Make the settings class from parsed values by field.

    Raises:
        ConfigError: in the words of the command line.
    """
    fields = {setting.field: setting for setting in settings_of(described)}
    known = {setting.field for setting in settings}
    try:
        return described(**{k: v for k, v in values.items() if k in fields and k in known})
    except ConfigError as error:
        setting = fields.get(str(error).partition(":")[0])
        if setting is None:
            raise
        raise ConfigError(re.sub(r"^\w+", setting.flag, str(error))) from error


def to_toml(*settled: object) -> str:
    """Render settings as a configuration file; what is None is left out, as a comment."""
    lines = []
    for one in settled:
        for setting in settings_of(type(one)):
            shown = _shown(setting, getattr(one, setting.field))
            lines.append(f"{setting.key} = {shown}" if shown else f"# {setting.key} =")
    return "\n".join(lines)


def _shown(setting: Setting, value: Any) -> str:  # noqa: ANN401 - any field's
    """A value as TOML; empty where it is None."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(str(item)) for item in value) + "]"
    if setting.field.endswith("_nbytes"):
        short = format_nbytes(value)
        exact = "." not in short and parse_nbytes(short, setting=setting.flag) == value
        return json.dumps(short) if exact else str(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else json.dumps(str(value))


def _shown_to_users(setting: Setting, value: Any) -> str:  # noqa: ANN401 - any field's
    """A default as it would be written on a command line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return _shown(setting, value).strip('"') if value not in (None, ()) else "not given"


def _for_users(text: str) -> str:
    """A field's docstring in the words of a command line: of flags, not of Python's values."""
    text = re.sub(r"\b(None|none):", "Not given:", text)

    def named(quoted: re.Match[str]) -> str:
        field = quoted[1]
        if re.fullmatch(r"[a-z]+(_[a-z]+)+", field):
            return f"--{_NAMES.get(field, field.removesuffix('_nbytes')).replace('_', '-')}"
        return field

    return re.sub(r"``([^`]*)``", named, text)


def _attributes(docstring: str) -> dict[str, str]:
    """What a docstring says of each attribute; a line may name several."""
    _, _, section = docstring.partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        entry = re.match(r" {4}(\w[\w, ]*): (.*)", line)
        if entry:
            names = [name.strip() for name in entry[1].split(",")]
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found
