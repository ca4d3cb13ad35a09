"""Hypothesis strategies for files that somebody else has written: names that lead astray, and manifests with one change
and a right checksum.
"""

import copy

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EVIL_NAMES = [
    "..",
    ".",
    "",
    "/etc/passwd",
    "../../victim.txt",
    "a/../../victim.txt",
    "a//b",
    "a/./b",
    "a\\..\\b",
    "C:\\x",
    "~/x",
    ".hidden",
    "-rf",
    "a\0b",
    "a\nb",
    "\u202egpj.x",
    "\ud800",
    "x" * 300,
    "a/" * 600 + "a",
]
names = st.one_of(
    st.sampled_from(EVIL_NAMES),
    st.text(max_size=40),
    st.lists(st.sampled_from(["..", ".", "", "a", "b.txt", "~", "\\", "\0"]), max_size=6).map(
        "/".join
    ),
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 3),
    st.floats(),
    names,
    st.lists(st.integers(-2, 2**17), max_size=3),
    st.dictionaries(names, st.integers(), max_size=2),
)
quick = settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def nodes(value):
    """Every container in a JSON value, with each of its keys."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield value, key
        yield from nodes(item)


@st.composite
def changed(draw, good):
    """A deep copy of a JSON object in which one thing is replaced, removed, renamed or added."""
    value = copy.deepcopy(good)
    container, key = draw(st.sampled_from(list(nodes(value))))
    how = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
    if how == "replace" or isinstance(container, list):
        container[key] = draw(values)
    elif how == "remove":
        del container[key]
    elif how == "rename":
        container[draw(names)] = container.pop(key)
    else:
        container[draw(names)] = draw(values)
    return value
