"""Models with special rules."""
