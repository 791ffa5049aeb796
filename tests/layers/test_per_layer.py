"""Exceptions of layers are written down in one way."""

from __future__ import annotations

import pytest

from tfkv.layers.per_layer import normal_form, with_exceptions


@pytest.mark.parametrize(
    ("cache", "exceptions", "usual", "written"),
    [
        ("k4v4", [], "dense+k4v4", ()),
        ("k4v4", ["0-1=int8", "4-5=int8"], "dense+k4v4", ("0-1,4-5=int8",)),
        ("k4v4", ["0,1,2=dense+int8"], "dense+k4v4", ("0-2=int8",)),
        ("k4v4", ["0-5=int8", "1=k4v4"], "dense+k4v4", ("0,2-5=int8",)),
        ("k4v4", ["2=k4v4"], "dense+k4v4", ()),
        ("k4v4", ["0-5=int8"], "dense+int8", ()),
        ("k4v4", ["0-5=int8", "3=float32"], "dense+int8", ("3=float32",)),
        ("kivi4", ["0-1=kivi4(group=16)"], "dense+kivi4", ("0-1=kivi4(group=16)",)),
        (
            "sliding_window(window=64)+int8",
            ["0=float32", "1=dense"],
            "sliding_window(window=64)+int8",
            ("0=float32", "1=dense+int8"),
        ),
    ],
)
def test_equal_exceptions_are_written_alike(cache, exceptions, usual, written):
    found = normal_form(cache, 6, exceptions)
    assert (str(found[0]), found[1]) == (usual, written)
    asked = [str(spec) for spec in with_exceptions(cache, 6, exceptions)]
    assert [str(spec) for spec in with_exceptions(*found[:1], 6, found[1])] == asked
