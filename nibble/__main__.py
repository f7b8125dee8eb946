"""`python -m nibble` is the same program as the `nibble` console script."""

from nibble.cli import main

main()
