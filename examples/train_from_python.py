"""Train a recipe from Python, in one process or under a launcher.

python examples/train_from_python.py tiny model.path=demo_out/model data.cache=demo_out/cache train.max_steps=2
torchrun --nproc-per-node 2 examples/train_from_python.py RECIPE data.cache=cache
"""

import sys

import wands


def main(recipe: str, *overrides: str) -> None:
    """Train a recipe: the name of a shipped recipe or a YAML file, and texts such as "train.max_steps=200"."""
    trainer = wands.Trainer(wands.load_recipe(recipe, overrides), deepspeed="zero2", resume="auto")
    print(f"the newest checkpoint: {trainer.train()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
