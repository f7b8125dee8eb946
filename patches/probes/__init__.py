"""The probes: one file a row of docs/patches.md (nibble.engine.patching.probe says what a probe
is).
"""
