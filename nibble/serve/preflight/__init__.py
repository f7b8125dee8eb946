"""What is checked before a load."""
