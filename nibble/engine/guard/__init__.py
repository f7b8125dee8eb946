"""The request guard: limits on connections, bodies and fields before vLLM sees a request."""
