"""The `nibble` console script, and `python -m nibble`: the same program."""

import sys

from nibble.machine.early_stop import stop_early


def main() -> None:
    """Run; a stop signal is heard before the imports of the rest."""
    stop_early(sys.argv[1:])
    from nibble.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
