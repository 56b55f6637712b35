import pytest

from mergelab.config.document import parse_value, read_document
from mergelab.errors import RecipeError


def refusal(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError) as caught:
        read_document(path)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "FILE: is empty; a mapping of keys was expected."),
        ("# only a comment\n", "FILE: is empty; a mapping of keys was expected."),
        ("- a\n", "FILE: holds a list; a mapping of keys (`name: ...`) was expected."),
        ("hello\n", "FILE: holds plain text; a mapping of keys (`name: ...`) was expected."),
        ("3\n", "FILE: holds the value 3; a mapping of keys (`name: ...`) was expected."),
        ("a: 1\nb: 2\na: 3\n", "FILE:\n  - line 3: `a` was already given in line 1; keep one"),
        ("x: {a: 1, a: 2}\n", "FILE:\n  - line 1: `a` was already given in line 1; keep one"),
        (
            "a: 1\non: 2\n3: 4\na: 5\n",
            "FILE:\n  - line 2: the key `on` is not text; put it in quotes\n"
            "  - line 3: the key `3` is not text; put it in quotes\n"
            "  - line 4: `a` was already given in line 1; keep one",
        ),
        ("a: 1\nb: [1\nc: 2\n", "FILE: line 3, column 2: not valid YAML: expected ',' or ']', but got ':'."),
        ("a: 1\n---\nb: 2\n", "FILE: line 2, column 1: not valid YAML: but found another document."),
        (
            "a: !!python/object:os.system x\n",
            "FILE: line 1, column 4: not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'.",
        ),
        ("a: 2024-13-01\n", "FILE: not valid YAML: month must be in 1..12."),
        (b"a: \xff\n", "FILE: is not UTF-8 text (byte 3); a YAML file was expected."),
    ],
    ids=[
        "empty",
        "comment",
        "list",
        "text",
        "number",
        "twice",
        "twice-inside",
        "odd-keys",
        "syntax",
        "two-documents",
        "python-tag",
        "date",
        "bytes",
    ],
)
def test_bad_file_is_refused_with_its_line(tmp_path, content, message):
    assert refusal(tmp_path / "bad.yaml", content) == message


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"gone.yaml: no such file\.$"):
        read_document(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="is a folder; a YAML file was expected"):
        read_document(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-05", 1e-05),
        ("-2E+3", -2000.0),
        ("1.5e3", 1500.0),
        ("3", 3),
        ("[0.2, 0.5]", [0.2, 0.5]),
        ("{base: 0.3}", {"base": 0.3}),
        ("null", None),
        ("", None),
        ("ties", "ties"),
        ("e5", "e5"),
    ],
)
def test_values_read_as_people_write_them(text, value):
    read = parse_value(text, "--set x")
    assert read == value
    assert type(read) is type(value)


def test_merge_keys_of_yaml_are_no_duplicates(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x {b: 1}\nc: {<<: *x, b: 2}\n")
    assert read_document(path) == {"a": {"b": 1}, "c": {"b": 2}}
