"""The Hugging Face Hub as wands sees it: a repository, errors in one sentence, a secret no message shows."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from wands import __version__
from wands.errors import WandsError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each new attempt: the Hub client does not repeat a plain commit that was turned down."""
FIRST_CONTACT_WAITS = RETRY_WAITS[:2]
"""Nothing is lost yet when the first request fails, and a wrong address should be told soon."""

_LOGIN = "make a token with write access, then run `hf auth login` or set HF_TOKEN"
_AGAIN = "run the same command again: what has arrived is not sent twice"
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")


@dataclass(frozen=True)
class Hub:
    """One server, one repository, and the secret that no message may show."""

    api: HfApi
    token: str = field(repr=False)
    repo_id: str

    def call(self, doing: str, request: Callable[[], T], waits: tuple[float, ...]) -> T:
        """Return what `request` returns; wait and repeat it while the server or the network is at fault."""
        for wait in (*waits, None):
            try:
                return request()
            except (OSError, ValueError, RuntimeError, _http_error()) as error:
                cause = _cause(error)
                if wait is None or not _is_transient(cause):
                    # Without the chain: a traceback would print what the server may have echoed.
                    raise self._explain(doing, cause) from None
                log.warning("%s failed (%s); trying again in %g s", doing, self._text(cause), wait)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _text(self, error: BaseException) -> str:
        """Return an error as one short line without the token."""
        status = _status(error)
        said = getattr(error, "server_message", None) or str(error)
        line = " ".join(said.replace(self.token, "***").split())[:300].rstrip(". ")
        return f"HTTP {status}: {line}" if status else f"{type(error).__name__}: {line}"

    def _explain(self, doing: str, error: BaseException) -> WandsError:
        text, status, name = self._text(error), _status(error), f"repo_id={self.repo_id}"
        if status == 404 and "/xet-write-token/" in text:
            where = f"endpoint={self.api.endpoint}"
            return WandsError(
                f"{where} has no Xet storage ({text}); set HF_HUB_DISABLE_XET=1 and push again."
            )
        if status == 401:
            return WandsError(f"{name} {self.api.endpoint} refuses the token ({text}); {_LOGIN}.")
        if status in (403, 404):
            return WandsError(
                f"{name} cannot be written with this token ({text}); push to a name of your own, or {_LOGIN}."
            )
        if status == 409:
            return WandsError(f"{name} was changed by somebody else meanwhile ({text}); {_AGAIN}.")
        if status:
            return WandsError(f"{name} {doing} was refused ({text}); {_AGAIN}.")
        if isinstance(error, (ConnectionError, TimeoutError, _http_error())):
            where = f"endpoint={self.api.endpoint}"
            return WandsError(
                f"{where} cannot be reached ({text}); check address and network, then {_AGAIN}."
            )
        return WandsError(f"{name} {doing} failed ({text}); mend that, then {_AGAIN}.")


def connect(repo_id: str, token: str | None, endpoint: str | None) -> Hub:
    """Check all that can be checked without the network.

    Args:
        repo_id: ``owner/name`` or ``name``.
        token: None takes HF_TOKEN or what ``hf auth login`` stored.
        endpoint: None takes HF_ENDPOINT or the public Hub.

    Raises:
        WandsError: no usable name, address or token, or offline mode.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise WandsError(
            f"repo_id={repo_id} is no name for a repository; use owner/name, at most 96 letters, digits, "
            "'-', '_' and '.', with no '-' or '.' doubled or at an end."
        ) from None
    endpoint = endpoint or constants.ENDPOINT
    if not re.match(r"https?://\w", endpoint):
        raise WandsError(f"endpoint={endpoint} is no web address; write https://host.")
    if constants.HF_HUB_OFFLINE:
        raise WandsError(
            "HF_HUB_OFFLINE forbids every request to the Hub; unset it (and TRANSFORMERS_OFFLINE) to push."
        )
    try:
        secret = (token or get_token() or "").strip()
    except Exception as error:  # a keyless login has kinds of failure of its own, differing by version
        raise WandsError(
            f"The Hub token cannot be had ({type(error).__name__}: {error}); {_LOGIN}."
        ) from error
    if not secret:
        raise WandsError(f"No Hub token was found for repo_id={repo_id}; {_LOGIN}.")
    if not re.fullmatch(r"[!-~]+", secret):
        # The HTTP client would refuse such a header with an error that shows it.
        raise WandsError(f"The Hub token holds characters that no token has; {_LOGIN}.")
    return Hub(
        HfApi(endpoint=endpoint, token=secret, library_name="wands", library_version=__version__),
        secret,
        repo_id,
    )


def open_repository(hub: Hub, *, public: bool, revision: str | None) -> Hub:
    """Create the repository and the branch where they are missing.

    Args:
        hub: what `connect` returned.
        public: visibility of a new repository; an existing one keeps its own, a difference is logged.
        revision: branch that is needed; None is ``main``.

    Returns:
        The hub with the full ``owner/name``.
    """
    from huggingface_hub import ModelInfo
    from huggingface_hub.errors import RepositoryNotFoundError

    if "/" not in hub.repo_id:
        owner = hub.call("asking for the account", hub.api.whoami, FIRST_CONTACT_WAITS)["name"]
        hub = replace(hub, repo_id=f"{owner}/{hub.repo_id}")
    api, repo_id = hub.api, hub.repo_id

    def existing() -> ModelInfo | None:
        try:
            return api.model_info(repo_id)
        except RepositoryNotFoundError:
            return None

    info = hub.call("asking for the repository", existing, FIRST_CONTACT_WAITS)
    if info is None:
        create = partial(api.create_repo, repo_id, private=not public, exist_ok=True)
        hub.call("making the repository", create, FIRST_CONTACT_WAITS)
        log.info("made the %s repository %s", "public" if public else "private", repo_id)
    elif info.private == public:
        have, asked = ("private", "public") if info.private else ("public", "private")
        log.warning("%s is %s already, not %s; wands leaves that as it is", repo_id, have, asked)
    if revision and revision != "main" and not revision.startswith("refs/"):
        branch = partial(api.create_branch, repo_id, branch=revision, exist_ok=True)
        hub.call(f"making the branch {revision}", branch, FIRST_CONTACT_WAITS)
    return hub


def _http_error() -> type[Exception]:
    """Return the base of the HTTP client's exceptions: which client that is depends on the Hub library."""
    from huggingface_hub.errors import HfHubHTTPError

    base = HfHubHTTPError.__bases__[0]
    assert issubclass(base, Exception), base
    return base


def _cause(error: BaseException) -> BaseException:
    """Return what lies under the RuntimeError that the Hub client wraps a failed file upload in."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code
    # The Xet transfer raises plain errors: only their text has the status.
    told = _XET_STATUS.search(str(error))
    return int(told[1]) if told else None


def _is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: overloaded or broken server, lost connection."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    return isinstance(error, (ConnectionError, TimeoutError, _http_error()))
