"""The options, a module for each group of the table in docs/operations.md."""
