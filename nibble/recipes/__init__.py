"""What is known of a model."""
