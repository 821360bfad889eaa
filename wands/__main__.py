"""Run the command `wands` as ``python -m wands``, the form with which launchers such as deepspeed and torchrun start it."""

import sys

try:
    from wands.cli import main
except KeyboardInterrupt:  # while the packages are imported; click says the same later
    sys.exit("Aborted!")

if __name__ == "__main__":
    main()
