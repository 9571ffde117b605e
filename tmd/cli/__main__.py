"""``python -m tmd.cli``."""

from tmd.cli import main

main()
