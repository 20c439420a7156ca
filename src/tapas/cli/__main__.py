"""`python -m tapas.cli`."""

from tapas.cli.main import main

main()
