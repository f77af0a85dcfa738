"""``python -m diptych`` and ``torchrun -m diptych``."""

from diptych.cli import main

main()
