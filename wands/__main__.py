"""``python -m wands`` is the same as ``wands``: launchers such as deepspeed and torchrun start it this way."""

from wands.cli import main

if __name__ == "__main__":
    main()
