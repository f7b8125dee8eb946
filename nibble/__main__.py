"""The `nibble` console script, and `python -m nibble`: the same program."""

import gc
import sys

from nibble.machine.early_stop import stop_early


def main() -> None:
    """Run; a stop signal is heard before the imports of the rest."""
    stop_early(sys.argv[1:])
    gc.set_threshold(50_000)  # with 700, collections during imports take 8 % of `nibble plan`
    from nibble.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
