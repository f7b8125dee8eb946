"""The probes: one file a row of docs/patches.md (nibble.patching.probe says what a probe is)."""
