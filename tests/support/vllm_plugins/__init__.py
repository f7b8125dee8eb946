"""Plugins that vLLM loads in tests: faults, hangs, and platforms that are not here."""
