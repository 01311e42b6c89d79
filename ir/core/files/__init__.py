"""One door for every data file: opened, bounded, parsed and typed here, with errors that name file, key and fix."""

from ir.core.files.parse import check_plain, parse_csv, parse_json, parse_toml, read_json, read_toml
from ir.core.files.read import FileErrors, check_regular, cut, named_path, read_bytes, read_text, run_file
from ir.core.files.typed import HIDDEN, Text, resolve_types, typed, words
from ir.core.files.write import FULL, finite, writing

__all__ = [
    "FULL",
    "HIDDEN",
    "FileErrors",
    "Text",
    "check_plain",
    "check_regular",
    "cut",
    "finite",
    "named_path",
    "parse_csv",
    "parse_json",
    "parse_toml",
    "read_bytes",
    "read_json",
    "read_text",
    "read_toml",
    "resolve_types",
    "run_file",
    "typed",
    "words",
    "writing",
]
