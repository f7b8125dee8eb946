"""Running a server."""
