"""Runs a server."""
