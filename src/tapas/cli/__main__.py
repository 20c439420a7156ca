"""`tapas`, and `python -m tapas.cli`."""

import sys


def main() -> None:
    """Ctrl-C is no defect, wherever it comes: also while the command line itself is being imported."""
    try:
        from tapas.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
