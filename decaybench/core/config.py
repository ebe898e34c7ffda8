"""The base of every configuration: unknown keys forbidden, and errors that name key, value and the nearest key."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from decaybench.core.errors import UserError
from decaybench.core.hashing import without_absent
from decaybench.core.names import nearest

# Pydantic speaks of Python's types; what is wrong was written in YAML.
_IN_YAML = {
    "tuple_type": "a list belongs here, in [brackets]",
    "list_type": "a list belongs here, in [brackets]",
    "dict_type": "keys with values belong here, {key: value}",
    "model_type": "keys with values belong here, {key: value}",
    "model_attributes_type": "keys with values belong here, {key: value}",
    "too_short": "a list of one at least belongs here",
}


class Config(BaseModel):
    """A frozen configuration object. Unknown keys are errors at every level, and numbers are finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for 1, and so does a typing mistake: training.steps=true would train one step."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field and not {bool, Any} & _plain_types(field.annotation):
            raise ValueError("true and false stand for nothing here")
        return value

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON-able data, every default filled in."""
        return self.model_dump(mode="json")


C = TypeVar("C", bound=BaseModel)


def parse(kind: type[C], data: Mapping[str, Any], where: str = "") -> C:
    """`data` as a `kind`. Raises UserError with one line on the first thing that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserError(explain(error, kind, where)) from None


def explain(error: ValidationError, kind: type[BaseModel], where: str = "") -> str:
    """One line for a pydantic error: the key's full path, the value, and the nearest valid key."""
    problems = _distinct(error.errors())
    # A misspelt required key is both missing and unknown; the unknown one is what to say.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    if first["type"] == "extra_forbidden":
        problems = [problem for problem in problems if problem["type"] != "missing"]
    path = [str(part) for part in first["loc"]]
    key = ".".join(([where] if where else []) + path) or kind.__name__
    rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(kind, path[:-1])
        hint = (_further_down(kind, path) or nearest(path[-1], known)) if path else None
        tail = f"did you mean {hint!r}?" if hint else f"known: {', '.join(sorted(known)) or 'none'}"
        return f"unknown key {key!r} (value {_short(first['input'])}); {tail}{rest}"
    if first["type"] == "missing":
        return f"{key} is missing{rest}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not path:
        return (f"{where}: " if where else "") + message + rest
    if first["type"] == "value_error" and message.startswith(f"{key}."):
        return message + rest  # it names a key of this one, whose whole content says less
    message = _IN_YAML.get(first["type"], message[:1].lower() + message[1:])
    hint = ""
    if first["type"] == "literal_error":
        found = nearest(str(first["input"]), _expected(first.get("ctx", {}).get("expected", "")))
        hint = f"; did you mean {found!r}?" if found else ""
    return f"{key}={_short(first['input'])}: {message}{hint}{rest}"


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises UserError when it can't be read or isn't a mapping."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 a SafeLoader
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not text, or a date like 2020-99-99
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        raise UserError(f"{path} is empty; it must hold a mapping of keys to values")
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, not {type(content).__name__}")
    return content


def apply_settings(data: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """`data` with each `a.b.c=value` of `settings` put in; values are read as YAML. Raises UserError."""
    for setting in settings:
        key, found, text = setting.partition("=")
        path = key.strip().split(".")
        if not found or not all(path):
            raise UserError(f"--set takes key=value, for example training.steps=500, not {setting!r}")
        try:
            value = number_or_text(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            raise UserError(f"--set {key}: {text!r} is not a YAML value") from None
        merge(data, nested(path, value))
    return data


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Put `over` into `base`, mapping by mapping; values of `over` win. Returns `base`."""
    for key, value in over.items():
        known = base.get(key)
        if isinstance(value, Mapping) and isinstance(known, dict):
            merge(known, value)
        else:
            base[key] = value
    return base


def number_or_text(value: Any) -> Any:
    """`value`, but a text that is a number as this number: YAML 1.1 reads 1e-3 (no dot) as a text, and nobody else."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def nested(path: list[str], value: Any) -> dict[str, Any]:
    """{a: {b: value}} from the path [a, b]."""
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted key. None is absent, so that an option which is new since something was made changes nothing in it."""
    found: dict[str, Any] = {}
    for key, value in without_absent(dict(content)).items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML's loader takes the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in known:
                    where = f"line {key.start_mark.line + 1}"
                    raise yaml.constructor.ConstructorError(problem=f"key {key.value!r} stands there twice, {where}")
                known.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _distinct(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    # A list with a wrong item is also said to be too short: what is wrong deeper down is the cause.
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem, place in zip(problems, places, strict=True)
        if not any(len(other) > len(place) and other[: len(place)] == place for other in places)
    ]


def _known_keys(kind: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():  # the place in a list: its items are what the annotation names
            continue
        field = kind.model_fields.get(part)
        inner = list(_models_in(field.annotation)) if field else []
        if not inner:
            return []
        kind = inner[0]
    return list(kind.model_fields)


def _further_down(kind: type[BaseModel], path: list[str]) -> str | None:
    """learning_rate at the top is training.learning_rate: the one place below where the very name is known."""
    places = [
        f"{part}.{path[0]}"
        for part, field in kind.model_fields.items()
        for inner in _models_in(field.annotation)
        if path[0] in inner.model_fields
    ]
    return places[0] if len(path) == 1 and len(set(places)) == 1 else None


def _plain_types(annotation: Any) -> set[Any]:
    return {annotation}.union(*(_plain_types(argument) for argument in get_args(annotation)))


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _expected(text: str) -> list[str]:
    return [part.strip(" '") for part in text.replace(" or ", ",").split(",")]


def _short(value: Any) -> str:
    """A value as it is typed in YAML, a text in quotes."""
    text = repr(value)
    if value is None or isinstance(value, bool | dict | list | tuple):
        with contextlib.suppress(yaml.YAMLError):
            plain = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf).removesuffix("\n...\n").strip()
    return text if len(text) <= 60 else text[:57] + "..."
