"""Held-out text of real_model_quality.py and tests/e2e/test_real_model.py, as token ids.

It is what the modules of Python's standard library say of themselves (PSF licence, in every
Python). nibble calibrates with another text, the topics of Python's manual.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from pathlib import Path
from typing import Any

LENGTH = 512  # tokens of one row
ROWS = 8
LEAST_CHARACTERS = 1500


def module_docstrings() -> list[str]:
    """The long docstrings of the standard library's modules, by file name."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_bytes()))
        if text and len(text) > LEAST_CHARACTERS:
            found.append(text)
    return found


def held_out(tokenizer: Any, rows: int = ROWS) -> list[list[int]]:
    """The first LENGTH tokens of `rows` docstrings, spread over the alphabet.

    REAL_MODEL_ROWS names a JSON file that holds them: docstrings change with Python, and results
    of two machines are for one text.
    """
    if file := os.environ.get("REAL_MODEL_ROWS"):
        return json.loads(Path(file).read_text())[:rows]
    texts = (tokenizer(text, add_special_tokens=False).input_ids for text in module_docstrings())
    found = [ids[:LENGTH] for ids in texts if len(ids) >= LENGTH]
    assert len(found) >= rows, f"{len(found)} docstrings of {LENGTH} tokens; expected {rows}"
    return found[:: len(found) // rows][:rows]


def digest(rows: list[list[int]]) -> str:
    """Which text a result is for: docstrings change with Python."""
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
