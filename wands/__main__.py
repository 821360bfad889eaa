"""Run the command `wands` as ``python -m wands``, the form with which launchers such as deepspeed and torchrun start it."""

from wands.cli import main

if __name__ == "__main__":
    main()
