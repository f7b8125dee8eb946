"""`nibble doctor`: what is wrong with this machine."""
