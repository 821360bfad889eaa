"""Models that caption frames: a model of transformers in this process, or a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import base64
import io
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from huggingface_hub import InferenceClient
from PIL import Image

from wands.config.options import CaptionOptions
from wands.encoders.components import loading_part
from wands.errors import ConfigError, one_line
from wands.model.files.hub import fetch_model

Captioner = Callable[[Sequence[np.ndarray], Sequence[str], int | None], list[tuple[str, bool]]]
"""Function of (clips, prompts, seed). Each clip is uint8 [F, H, W, 3] RGB and has one prompt. With a seed, answers are sampled;
without, they are greedy. Returns (answer, whether the answer was cut off) for each clip."""
KEY_VARIABLE = "OPENAI_API_KEY"
RETRIES = 5
TEMPERATURE = 0.7
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def load_captioner(options: CaptionOptions, device: torch.device) -> Captioner:
    """Load an image-text-to-text model of transformers. Code of the model's repository and pickles are refused.

    Raises:
        ConfigError: if the model cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = fetch_model(options.model, key="--model", allow=FILES)
    with loading_part(options.model, "captioner"):
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForImageTextToText.from_pretrained(
            folder, trust_remote_code=False, use_safetensors=True, dtype=dtype
        )
    model.to(device).eval()
    lock = threading.Lock()
    tokenizer = processor.tokenizer
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    # The texts of a table must not contain the placeholders and control tokens of the model.
    special = re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or r"(?!)")

    def to_text(frames: np.ndarray, prompt: str) -> str:
        content = [{"type": "image"}] * len(frames) + [{"type": "text", "text": special.sub(" ", prompt)}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )

    def run(clips: Sequence[np.ndarray], prompts: Sequence[str], seed: int | None) -> list[tuple[str, bool]]:
        texts = [to_text(frames, prompt) for frames, prompt in zip(clips, prompts, strict=True)]
        images = [[Image.fromarray(frame) for frame in frames] for frames in clips]
        starts = bool(tokenizer.bos_token) and texts[0].startswith(tokenizer.bos_token)
        inputs = processor(
            text=texts, images=images, padding=True, return_tensors="pt", add_special_tokens=not starts
        ).to(device, dtype)
        sampling = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": TEMPERATURE}
        try:
            with lock, torch.inference_mode():
                torch.manual_seed(seed or 0)
                tokens = model.generate(**inputs, max_new_tokens=options.max_tokens, **sampling)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"--batch={options.batch} does not fit into memory; lower --batch, --frames or --max-side"
            ) from None
        tokens = tokens[:, inputs["input_ids"].shape[1] :]
        ends = model.generation_config.eos_token_id
        is_end = torch.isin(tokens, torch.tensor([] if ends is None else ends, device=device).flatten())
        cut = (tokens.shape[1] >= options.max_tokens) & ~is_end.any(1)
        return list(zip(tokenizer.batch_decode(tokens, skip_special_tokens=True), cut.tolist(), strict=True))

    return run


def connect_captioner(options: CaptionOptions) -> Captioner:
    """Return a captioner that asks an OpenAI-compatible endpoint. It sends the key in the variable OPENAI_API_KEY, if set."""
    client = InferenceClient(
        base_url=options.endpoint, api_key=os.environ.get(KEY_VARIABLE, "none"), timeout=options.timeout
    )

    def run(clips: Sequence[np.ndarray], prompts: Sequence[str], seed: int | None) -> list[tuple[str, bool]]:
        (frames,), (prompt,) = clips, prompts
        parts = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        request = {
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}],
            "model": options.model,
            "max_tokens": options.max_tokens,
            "temperature": 0.0 if seed is None else TEMPERATURE,
            "seed": seed or 0,
        }
        return [_ask(client, request, str(options.endpoint))]

    return run


def _ask(client: InferenceClient, request: dict[str, Any], endpoint: str) -> tuple[str, bool]:
    """Send a request, once again after a timeout, and several times while the server is busy.

    Raises:
        ConfigError: if the endpoint cannot be reached, refuses the request, or sends something else than a chat completion.
    """
    for attempt in range(RETRIES):
        try:
            choice = client.chat_completion(**request).choices[0]
            return str(choice.message.content or ""), choice.finish_reason == "length"
        except Exception as error:  # of httpx, huggingface_hub, or from an answer of another form
            status = getattr(getattr(error, "response", None), "status_code", None)
            busy = isinstance(error, OSError) and (status is None or status == 429 or status >= 500)
            if not busy or attempt >= (1 if isinstance(error, TimeoutError) else RETRIES - 1):
                reason = f"status {status}" if status else one_line(error)
                raise ConfigError(
                    f"--endpoint={endpoint} does not answer as an OpenAI-compatible server ({reason}); check the URL, --model "
                    f"and the key in {KEY_VARIABLE}"
                ) from None
        time.sleep(2.0**attempt / 2)
    raise AssertionError


def _data_url(frame: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
