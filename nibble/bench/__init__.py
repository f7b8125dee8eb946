"""Measures a running server as its clients see it."""
