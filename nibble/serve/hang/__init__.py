"""A vLLM that stands still."""
