"""Write docs/bad-input.md: `python -m tests.support.bad_input`."""

from __future__ import annotations

from tests.support.bad_input.table import DOCUMENT, IGNORED, all_rows, document

DOCUMENT.write_text(document(all_rows(), IGNORED))
print(DOCUMENT)
