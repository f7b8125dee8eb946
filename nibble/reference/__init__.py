"""A model's right answers, computed from its checkpoint: transformers' module with dequantized
weights in float32.

`python -m nibble.reference.compute` does it in a process that imports torch; the rest of nibble
only reads what it writes.
"""
