"""Checks before a load."""
