"""Programs that run vLLM's Python interface in a separate process, for one test each."""
