"""The package `wandb` as far as accelerate's tracker uses it. Calls are lines of a file."""

SOURCE = """
import json, os

class Run:
    step = 0
    def log(self, values, step):
        write("log", step=step, **{name: repr(value) for name, value in values.items()})
    def finish(self):
        write("finish")

def write(call, **values):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps({"call": call, "rank": os.environ.get("RANK", "0"), **values}) + "\\n")

def init(**options):
    write("init", **options)
    if os.path.exists(os.environ["FAKE_WANDB"] + ".down"):
        raise ConnectionError("no network")
    run = Run()
    run.step = int(os.environ.get("FAKE_WANDB_STEP", "0"))
    return run

class Config(dict):
    def update(self, values, allow_val_change):
        write("config", values=values)

config = Config()

class Image:
    def __init__(self, image):
        self.text = f"image {image.shape} {image.dtype}"
    def __repr__(self):
        return self.text

class Video(Image):
    def __init__(self, path):
        self.text = f"video {path}"
"""
