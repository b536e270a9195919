"""YAML written by people: nothing is dropped silently, and every error names its line."""

from __future__ import annotations

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
        return yaml.compose(text, _Loader), _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        raise NotYaml(source, error.problem or error.context or "no YAML", line) from error
    except RecursionError as error:
        raise NotYaml(source, "is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        raise NotYaml(source, str(error)) from error
    except (LookupError, AttributeError) as error:  # PyYAML's own, e.g. of `!!bool x`
        raise NotYaml(source, "a value is not what its tag says") from error
