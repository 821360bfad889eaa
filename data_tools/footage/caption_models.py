"""Models that caption frames: a model of transformers in this process, or a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from huggingface_hub import get_async_session
from PIL import Image

from wands.config.options import CaptionOptions
from wands.encoders.components import quiet_loading
from wands.errors import ConfigError, one_line
from wands.model.files.hub import fetch_model
from wands.texts import plural

Captioner = Callable[[Sequence[np.ndarray], Sequence[str], int | None], list[tuple[str, bool]]]
"""Function of clips (uint8 [F, H, W, 3] RGB), a prompt for each, and a seed, with which it samples; None decodes greedily. It
returns (answer, whether the answer was cut off) for each clip."""
KEY_VARIABLE = "OPENAI_API_KEY"
MAX_BYTES = 1 << 20
"""Largest response of a caption endpoint, in bytes. A larger response is an error."""
RETRIES = 5
TEMPERATURE = 0.7
TEMPLATE = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


def load_captioner(options: CaptionOptions, device: torch.device) -> Captioner:
    """Load an image-text-to-text model with transformers. Code and pickles in the model's repository are never loaded.

    Raises:
        ConfigError: if the model cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = fetch_model(options.model, key="--model", allow=FILES)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        with quiet_loading():
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForImageTextToText.from_pretrained(
                folder, trust_remote_code=False, use_safetensors=True, dtype=dtype
            )
        tokenizer = processor.tokenizer
    except Exception as error:
        raise ConfigError(
            f"--model={options.model} cannot be loaded ({one_line(error).partition('. ')[0]}). If a package is "
            # without a version, pip may replace torch
            f"missing, install it, for example: pip install torchvision torch=={torch.__version__.partition('+')[0]}. "
            "Otherwise choose an image-text-to-text model."
        ) from None
    model.to(device).eval()
    lock = threading.Lock()
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # The texts of a table must not contain the placeholders and control tokens of the model.
    special = re.compile("|".join(map(re.escape, tokenizer.get_added_vocab())) or r"(?!)")

    def to_chat(frames: np.ndarray, prompt: str) -> list[dict[str, Any]]:
        images = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        return [{"role": "user", "content": [*images, {"type": "text", "text": special.sub(" ", prompt)}]}]

    def run(clips: Sequence[np.ndarray], prompts: Sequence[str], seed: int | None) -> list[tuple[str, bool]]:
        chats = list(map(to_chat, clips, prompts))
        sampling = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": TEMPERATURE}
        try:
            inputs = processor.apply_chat_template(chats, processor_kwargs={"padding": True}, **TEMPLATE)
            with lock, torch.inference_mode():
                torch.manual_seed(seed or 0)
                inputs = inputs.to(device, dtype)
                tokens = model.generate(**inputs, max_new_tokens=options.max_tokens, **sampling)
        except Exception as error:  # too little memory, or a rule of this model
            raise ConfigError(
                f"--model={options.model} cannot caption {plural(len(clips), 'clip')} of {plural(len(clips[0]), 'image')} "
                f"({one_line(error)}); lower --batch, --frames or --max-side, or choose another model"
            ) from None
        tokens = tokens[:, inputs["input_ids"].shape[1] :]
        ends = model.generation_config.eos_token_id
        is_end = torch.isin(tokens, torch.tensor([] if ends is None else ends, device=device).flatten())
        cut = (tokens.shape[1] >= options.max_tokens) & ~is_end.any(1)
        return list(zip(tokenizer.batch_decode(tokens, skip_special_tokens=True), cut.tolist(), strict=True))

    return run


def connect_captioner(options: CaptionOptions) -> Captioner:
    """Return a captioner that asks an OpenAI-compatible endpoint, with the API key in OPENAI_API_KEY.

    A request is repeated once after a failed connection or an unexpected answer, and several times while the server is busy or
    has an internal error. After that, or if a request is refused, the captioner raises ConfigError.

    Raises:
        ConfigError: if the URL of the endpoint is invalid.
    """
    url = f"{options.endpoint}".rstrip("/") + "/chat/completions"
    if not re.fullmatch(r"https?://[^\s@?#]+", url):  # the message must not contain a key
        raise ConfigError(
            f"--endpoint must be a URL without password and query, such as http://localhost/v1; set {KEY_VARIABLE} to the API key"
        )
    key = re.sub(r"[^!-~]", "", os.environ.get(KEY_VARIABLE, ""))
    headers = {"Authorization": f"Bearer {key or 'none'}", "Accept-Encoding": "identity"}
    secret = re.compile(re.escape(key) or r"(?!)")

    async def send(request: dict[str, Any]) -> tuple[Any, bytearray]:
        body = bytearray()
        async with asyncio.timeout(options.timeout), get_async_session() as client:
            # The Hub's hooks would refuse a local server if HF_HUB_OFFLINE is set.
            client.event_hooks = {}
            client.follow_redirects = False
            async with client.stream("POST", url, json=request, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise ValueError(f"more than {MAX_BYTES:,} bytes")
                return response, body

    def run(clips: Sequence[np.ndarray], prompts: Sequence[str], seed: int | None) -> list[tuple[str, bool]]:
        (frames,) = clips
        (prompt,) = prompts
        parts = [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
        sampling = {"temperature": 0.0 if seed is None else TEMPERATURE, "seed": seed or 0}
        request = {"model": options.model, "messages": messages, "max_tokens": options.max_tokens, **sampling}
        for attempt in range(RETRIES):
            pause = 2.0**attempt / 2
            tries = 2
            try:
                response, body = asyncio.run(send(request))
                if response.status_code == 200:
                    choice = json.loads(body)["choices"][0]
                    text = secret.sub("***", choice["message"]["content"] or "")
                    return [(text, choice.get("finish_reason") == "length")]
                reason = f"status {response.status_code}"
                seconds = response.headers.get("retry-after", "")
                tries = RETRIES if response.status_code == 429 or response.status_code >= 500 else 1
                pause = float(seconds) if seconds.isdecimal() else pause
            except Exception as error:  # of the connection, or because the answer has another form
                reason = secret.sub("***", one_line(error))
            if attempt + 1 >= tries:
                break
            time.sleep(min(pause, options.timeout))
        raise ConfigError(
            f"--endpoint={options.endpoint} does not answer as an OpenAI-compatible server ({reason}); check the URL, --model, "
            f"--timeout and the API key in the environment variable {KEY_VARIABLE}"
        )

    return run


def _data_url(frame: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
