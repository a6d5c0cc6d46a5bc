"""``python -m mosaic_opt``: the command line."""

from mosaic_opt.cli import main

main()
