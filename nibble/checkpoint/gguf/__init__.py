"""Reads models from GGUF files, for `nibble convert`."""
