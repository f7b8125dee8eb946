"""The request guard: limits on connections, bodies and fields of requests, checked before vLLM
sees them.
"""
