"""What is served, and why."""
