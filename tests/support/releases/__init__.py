"""Unpacked and changed copies of vLLM and nibble, and tools that read their GPU code."""
