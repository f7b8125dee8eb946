"""What was asked for."""
