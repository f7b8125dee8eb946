"""What nibble refuses, as data: the rows of docs/bad-input.md, which their tests run."""
