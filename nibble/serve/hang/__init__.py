"""Detects and ends a vLLM that hangs."""
