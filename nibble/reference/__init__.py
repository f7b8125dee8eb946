"""A model's correct answers, computed by transformers from its checkpoint in float32.

`python -m nibble.reference.compute` does it in a process that imports torch; the rest of nibble
only reads what it writes.
"""
