"""Values of a JSON file say where they stand when they are not what is wanted."""

from __future__ import annotations

import pytest

from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError

FILE = JsonField("graph.json", "", {"nodes": [{"name": "a", "sizes": [0, 3], "once": False}, 7]})


def test_values_are_found_where_they_are():
    node, number = FILE["nodes"].items()
    assert (node["name"].text(), node["sizes"].sizes(), node["once"].flag(), number.whole()) == ("a", [0, 3], False, 7)
    assert JsonField("f", "x", True).flag() is True
    assert [(name, field.place) for name, field in node.fields()] == [
        ("name", "nodes[0].name"), ("sizes", "nodes[0].sizes"), ("once", "nodes[0].once")
    ]  # fmt: skip
    assert {node.file, number.file} == {"graph.json"} and number.place == "nodes[1]"


@pytest.mark.parametrize(
    ("read", "value", "wanted"),
    [
        (lambda field: field["x"], [], "an object"),
        (lambda field: list(field.fields()), [], "an object"),
        (lambda field: list(field.items()), {}, "a list"),
        (lambda field: field.sizes(), [-1], "a whole number"),
        (JsonField.text, 3, "a string"),
        (JsonField.text, "a\n", "a string"),
        (JsonField.whole, 1.5, "a whole number"),
        (JsonField.whole, -1, "a whole number"),
        (JsonField.whole, True, "a whole number"),
        (lambda field: field.whole(below=3), 3, "a whole number below 3"),
        (JsonField.flag, 1, "true or false"),
    ],
)
def test_what_is_damaged_is_named_with_its_place(read, value, wanted):
    with pytest.raises(FileError, match=rf"SK505: graph.json is damaged: a.b(\[0\])? is .*, not {wanted}") as caught:
        read(JsonField("graph.json", "a.b", value))
    assert caught.value.nodes and caught.value.nodes[0].startswith("a.b")
    with pytest.raises(FileError, match="SK505: graph.json is damaged: it is not an object"):
        JsonField("graph.json", "", 3)["x"]
    with pytest.raises(FileError, match=r"it has no field 'nodes\[0\].kind'"):
        next(FILE["nodes"].items())["kind"]
