"""Plans: what nibble starts, and why."""
