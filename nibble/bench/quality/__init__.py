"""Quality of a server's answers: parity with a reference, calls of tools, tasks with a score."""
