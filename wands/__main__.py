"""``python -m wands`` is the same as ``wands``. Launchers such as deepspeed and torchrun start wands this way."""

from wands.cli import main

if __name__ == "__main__":
    main()
