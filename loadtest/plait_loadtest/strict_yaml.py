"""YAML written by people: nothing is dropped silently, and every error names its line, or its field in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


class NotYaml(ValueError):
    """Invalid YAML, in one sentence: the source, the line if known, and the problem; `where` lacks the source."""

    def __init__(self, source: str, problem: str, line: int | None = None) -> None:
        super().__init__(f"{source}{'' if line is None else f', line {line}'}: {problem}")
        self.where = f"{'' if line is None else f'line {line}: '}{problem}"


class _Loader(yaml.SafeLoader):
    """Rejects duplicate keys, of which YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def parse(text: str, source: str) -> tuple[yaml.Node | None, Any]:
    """Return the nodes (for their line numbers) and the value of a YAML or JSON text. Raises `NotYaml`."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        raise NotYaml(source, error.problem or error.context or "no YAML", line) from error
    except RecursionError as error:
        raise NotYaml(source, "is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise NotYaml(source, str(error)) from error
    except (LookupError, AttributeError) as error:  # PyYAML's own, e.g. of `!!bool x`
        raise NotYaml(source, "a value is not what its tag says") from error


def not_text(value: Any, field: str = "") -> Iterator[str]:
    """Yield the field, dotted, of each text that cannot be encoded: half a character (`"\\ud800"`), or bytes of a
    command line that are no UTF-8."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from not_text(key, field)
            yield from not_text(each, f"{field}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from not_text(each, f"{field}.{at}")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield field


def sentence(problem: Mapping[str, Any], field: str, *, beside: str = "") -> str:
    """Return what pydantic found wrong (one of `ValidationError.errors()`) with a field. `beside`: more about settings
    that are none."""
    message = problem["msg"].replace("Input should", "must").replace("valid tuple", "list")
    context, given = problem.get("ctx", {}), repr(problem["input"])
    tag = str(context.get("discriminator", "")).strip("'")
    match problem["type"]:
        case "missing":
            return f"{field} must be given"
        case "extra_forbidden":
            return f"{field}: there is no such setting{beside}"
        case "union_tag_not_found":
            return f"{field}.{tag} must be given"
        case "union_tag_invalid":
            return f"{field}.{tag}: one of {context['expected_tags']}, not {context['tag']!r}"
        case "value_error":
            return f"{field}: {message.removeprefix('Value error, ')}"
    return f"{field}: {message[0].lower()}{message[1:]}, not {given if len(given) <= 60 else f'{given[:57]}...'}"
