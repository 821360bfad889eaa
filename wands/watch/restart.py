"""torchrun that restarts the workers after a crash: `python -m wands.watch.restart [options of torchrun] -m wands train ...`.

`scripts/launch_multinode.sh` starts this program on every node. torchrun's own --max-restarts would restart the workers even
after an error that only the user can fix, without resuming from a checkpoint, and would limit the restarts of the whole run,
although a long run may need many.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from wands.checkpoint.step_folders import named_step
from wands.config.click_options import build_command
from wands.config.options import TrainOptions
from wands.config.recipe_loading import load_recipe
from wands.errors import DiskError, WandsError, one_line
from wands.texts import log_to_stderr

_log = logging.getLogger("wands.watch.restart")  # this module is also `__main__`

MAX_RESTARTS = 3
"""Number of restarts without a new checkpoint after which the run ends."""
_SAVE_TIMEOUT = 3600
"""Seconds for workers to finish the current step and save, after a signal. torchrun's 30 s are too short for a long step."""
_RESUME = "wands/resume"
_RESTART = f"%s; restarting (restart %d of at most {MAX_RESTARTS} without a new checkpoint)"
_GIVE_UP = (
    "%s. The run was restarted %d times without a new checkpoint and is not restarted again. Fix the error above, then "
    "continue with --resume."
)


class RestartingAgent(LocalElasticAgent):
    """torchrun's agent on a node, which restarts the workers of the node after a crash, with the option `--resume`.

    It does not after an error that only the user can fix, after a stop that a signal requested, and after `MAX_RESTARTS` restarts
    without a new checkpoint. Workers on a node that joins after a restart also get `--resume`.
    """

    def __init__(self, spec: Any, **options: Any) -> None:
        super().__init__(spec, **options)
        self._args = spec.args
        self._checkpoints = Path()
        self._num_restarts = 0
        self._is_path = False
        words = list(spec.args[spec.args.index("train") + 1 :])
        with suppress(Exception):  # the workers report a wrong command line or recipe
            train = build_command(TrainOptions, lambda options: options).main(words, standalone_mode=False)
            self._is_path = train.resume not in (None, "auto")
            self._checkpoints = Path(load_recipe(train.recipe, train.overrides).output_dir, "checkpoints")
        self._newest: Path | None = None
        self._first = self._newest = self._find_newest()

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        if codes:
            newest = self._find_newest()
            self._num_restarts = self._num_restarts + 1 if newest == self._newest else 1
            self._newest = newest
            # wands exits with 128 + the number of a signal if it ends at the request of this signal.
            stops = any(code == WandsError.exit_code or code > 128 for code in codes.values())
            if stops or self._num_restarts > MAX_RESTARTS:
                self._remaining_restarts = 0
            if not stops:
                message = _GIVE_UP if self._num_restarts > MAX_RESTARTS else _RESTART
                ranks = ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items())
                _log.warning(message, ranks, min(self._num_restarts, MAX_RESTARTS))
        return result

    def _find_newest(self) -> Path | None:
        with suppress(DiskError, OSError):  # the workers report it
            return named_step(self._checkpoints)
        return self._newest

    def _restart_workers(self, worker_group: Any) -> None:
        # All nodes read this key after they have met again, so that all workers get the same options.
        if not self._is_path or self._find_newest() != self._first:
            worker_group.store.underlying_store.set(_RESUME, "1")
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: Any) -> Any:
        if worker_group.store.underlying_store.check([_RESUME]):
            worker_group.spec.args = (*self._args, "--resume")  # replaces an earlier --resume PATH
        return super()._start_workers(worker_group)

    def _shutdown(self, *signals: Any, **options: Any) -> None:
        # torchrun passes a signal only if it received one. After a crash, the other workers do not save.
        if signals and self._pcontext:
            self._pcontext.close(signals[0], _SAVE_TIMEOUT)
        super()._shutdown(*signals, **options)


def main() -> None:
    """Run torchrun with `RestartingAgent`.

    The exit code is 2 if the workers fail and are not restarted, and 1 if the nodes do not find each other.
    """
    log_to_stderr()
    args = torchrun.parse_args(None)
    args.max_restarts = 10**6  # RestartingAgent decides
    # The agents' store would contain the addresses of the workers before a restart.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    host, _, port = args.rdzv_endpoint.rpartition(":")
    with suppress(OSError):  # this node's address on the way to node 0 is one that other nodes can reach
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            args.local_addr = args.local_addr or probe.getsockname()[0]
    vars(api)["LocalElasticAgent"] = RestartingAgent
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        if args.nnodes != "1":
            time.sleep(10)  # the other nodes learn about the end from the store on node 0
        sys.exit(WandsError.exit_code)
    except RendezvousError as error:
        sys.exit(
            f"wands: this node did not meet the other nodes ({one_line(error)}); read the output of the other nodes"
        )


if __name__ == "__main__":
    main()
