"""Settings: what the user sets, from all sources."""
