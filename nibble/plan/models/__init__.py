"""Models with rules of their own."""
