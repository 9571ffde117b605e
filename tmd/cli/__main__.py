"""``python -P -m tmd.cli``: without ``-P`` Python looks in the working directory first."""

from tmd.cli import main

main()
