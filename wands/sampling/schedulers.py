"""Schedulers for sampling: the noise schedule's shift, and the Euler scheduler for LoRAs that reduce sampling to 4 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler


def with_shift(scheduler: Any, flow_shift: float | None) -> Any:
    """Return a copy of a scheduler with a new shift (None keeps it), and without state of an earlier sampling loop."""
    change = {} if flow_shift is None else {shift_key(scheduler): flow_shift}
    return type(scheduler).from_config(scheduler.config, **change)


def shift_key(scheduler: Any) -> str:
    """Return the key for the shift of the noise schedule in a scheduler's config: "flow_shift" or "shift"."""
    # Solvers with flow sigmas, such as UniPC, call the shift flow_shift. FlowMatchEuler calls it shift.
    return "flow_shift" if "use_flow_sigmas" in scheduler.config else "shift"


class EulerScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler scheduler with the noise levels 1, 1 - 1/N, ..., 1/N before the shift, for N steps.

    LoRAs that reduce sampling to 4 steps are trained at these noise levels. With shift 5, the timesteps are 1000, 937.5, 833.3
    and 625. In diffusers' `FlowMatchEulerDiscreteScheduler`, the last step starts at a noise level of almost 0 instead of 1/N and
    would change almost nothing.
    """

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        super().set_timesteps(device=device, sigmas=np.linspace(1, 0, num_inference_steps, False).tolist())
