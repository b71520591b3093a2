"""``python -m hspec.cli``."""

from hspec.cli import main

main()
