"""`python -m tests.pages`."""

from tests.pages import main

main()
