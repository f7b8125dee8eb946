"""What several tests use, by topic."""
