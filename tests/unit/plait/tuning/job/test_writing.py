"""Settings written into the text of a plait.yaml: comments stay, and what cannot be edited is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import PlaitError
from plait.tuning.forms import with_settings

TEXT = """\
# my server
server: {port: 8001}   # here
images:
  # the model
  model: emoji
  knobs:
    largest_batch: 8   # was 16
recommend:
"""
COMMENTS = [" my server", " here", " the model", " was 16"]


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("images", "knobs", "largest_batch"), 4, "    largest_batch: 4   # was 16"),
        (("images", "knobs", "exact"), "never", "    exact: never"),
        (("images", "replicas"), 2, "  replicas: 2\n  # the model"),
        (("server", "host"), "::1", "server: {host: '::1', port: 8001}   # here"),
        (("recommend", "models", "p", "folder"), "/x", "recommend: {models: {p: {folder: /x}}}"),
        (("ray", "num_cpus"), 3, "recommend:\nray:\n  num_cpus: 3"),
    ],
)
def test_a_setting_is_written_where_it_belongs(path: tuple[str, ...], value: Any, line: str) -> None:
    """Replaced in place or added to its section, and every comment is still there."""
    after = with_settings(TEXT, {path: value})
    assert line in after
    assert [text.partition("#")[2] for text in after.split("\n") if "#" in text] == COMMENTS
    found = yaml.safe_load(after)
    for key in path:
        found = found[key]
    assert found == value


def test_a_file_of_comments_gets_its_first_section() -> None:
    """Nothing at all, or nothing but comments, is a file too."""
    assert with_settings("# only this\n", {("a", "b"): 1}) == "# only this\na:\n  b: 1\n"
    assert with_settings("", {("a", "b"): "x: y"}) == "a:\n  b: 'x: y'\n"


def test_a_file_that_is_too_unusual_is_refused() -> None:
    """Rather no change than a mangled file; the message says what to set by hand."""
    text = "base: &it {b: 1}\na: *it\n"
    with pytest.raises(PlaitError, match=r"set by hand: a\.b=2"):
        with_settings(text, {("a", "b"): 2})


KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.one_of(st.integers(-9, 9), st.booleans(), st.sampled_from(["x", "a b", "no", "::1", "1.0"]))


@given(
    data=st.dictionaries(KEYS, st.one_of(LEAVES, st.dictionaries(KEYS, LEAVES, max_size=3)), max_size=3),
    flow=st.booleans(),
    path=st.lists(KEYS, min_size=1, max_size=3).map(tuple),
    value=LEAVES,
)
def test_only_the_setting_changes(data: dict[str, Any], flow: bool, path: tuple[str, ...], value: Any) -> None:
    """Read back, the file differs in that one place, whatever its style; or it was refused."""
    text = yaml.safe_dump(data, default_flow_style=flow)
    wanted = yaml.safe_load(text) or {}
    place = wanted
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[path[-1]] = value
    assert yaml.safe_load(with_settings(text, {path: value})) == wanted
