"""What is wrong with this machine."""
