"""`nibble doctor`: finds what is wrong with this machine."""
