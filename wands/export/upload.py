"""Send requests to the Hugging Face Hub, and send them again if the server or the network fails.

Error messages explain the cause of a failure and never contain the token.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils._http import default_client_factory

from wands.disk_errors import disk_number
from wands.errors import DiskError, WandsError, one_line
from wands.version import __version__

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds to wait before each new attempt of a failed request. The Hub client itself does not repeat a commit that the server
rejected."""
FIRST_CONTACT_WAITS = RETRY_WAITS[:2]
"""Seconds to wait before each new attempt of a request before the upload: only two, so that a wrong address is reported soon."""

ANSWER_SECONDS = 60.0
"""Largest time without any byte from the Hub in one attempt. Without it, a server that never answers would hang a push."""

_LOGIN = "make a token with write access, then run `hf auth login` or set HF_TOKEN"
_AGAIN = "run the same command again: files that were uploaded are not sent twice"


@dataclass(frozen=True)
class Hub:
    """A repository on a Hub server. `api` has the token of the user."""

    api: HfApi
    repo_id: str

    def call(self, action: str, request: Callable[[], T], waits: tuple[float, ...]) -> T:
        """Send a request and return its result. If the server or the network fails, send it again after each time in `waits`.

        `action` describes the request for messages, such as "creating the repository".

        Raises:
            WandsError: if the server refuses the request, or all len(waits) + 1 attempts fail.
        """
        # The base class belongs to the HTTP client of the installed huggingface_hub.
        network_errors = (ConnectionError, TimeoutError, HfHubHTTPError.__bases__[0])
        try:
            return request()
        except (AttributeError, LookupError, TypeError, AssertionError) as error:  # JSON of another shape
            raise self._no_hub(action, f"{type(error).__name__}: {one_line(error)}") from None
        except (OSError, ValueError, RuntimeError, *network_errors) as error:
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
                cause = cause.__cause__  # the Hub client wraps the error of a file upload
            if isinstance(cause, json.JSONDecodeError):
                raise self._no_hub(action, "no JSON") from None
            status = _status(cause)
            text = self._text(cause, status)
            is_network = isinstance(cause, network_errors)
            transient = status in (408, 429) or status >= 500 if status else is_network
            if not waits or not transient:
                # `from None` leaves out the cause. A traceback would otherwise print a token in the server's answer.
                explained = self._explain(action, text, status, is_network)
                if not is_network and (number := disk_number(cause)):  # of a file that is sent
                    raise DiskError(explained, number=number) from None
                raise WandsError(explained) from None
        log.warning("%s failed (%s); trying again in %g s", action, text, waits[0])
        time.sleep(waits[0])
        return self.call(action, request, waits[1:])

    def _no_hub(self, action: str, reason: str) -> WandsError:
        return WandsError(
            f"--endpoint {self.api.endpoint}: {action} got an answer that no Hub gives ({reason}), such as the login page of a "
            f"proxy. Check address and network, then {_AGAIN}."
        )

    def check_files(self, operations: Iterable[CommitOperationAdd], revision: str) -> None:
        """Compare the files of a commit with those on the Hub, which leaves out files that a `.gitignore` there names.

        Raises:
            WandsError: if a file is missing, or has another content.
        """

        def list_files() -> dict[str, Any]:
            tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=revision)
            return {item.path: item for item in tree if hasattr(item, "blob_id")}

        there = self.call("listing the uploaded files", list_files, RETRY_WAITS)
        missing = [one.path_in_repo for one in operations if not _is_same(one, there.get(one.path_in_repo))]
        if missing:
            raise WandsError(
                f"REPO_ID {self.repo_id}: the Hub left out {', '.join(missing)}, because a .gitignore of the repository names "
                "these files, or because of another rule of the server. Remove these lines from .gitignore, and push again."
            )

    def _text(self, error: BaseException, status: int | None) -> str:
        """Return an error as one line with its HTTP status or class, such as "HTTP 404: Not Found". Stars replace the token."""
        message = getattr(error, "server_message", None) or str(error)
        line = one_line(ValueError(message.replace(str(self.api.token), "***")), 300)
        return f"HTTP {status}: {line}" if status else f"{type(error).__name__}: {line}"

    def _explain(self, action: str, text: str, status: int | None, is_network: bool) -> str:
        name = f"REPO_ID {self.repo_id}"
        endpoint = f"--endpoint {self.api.endpoint}"
        if status == 404 and "/xet-write-token/" in text:
            return f"{endpoint} has no Xet storage ({text}); set HF_HUB_DISABLE_XET=1 and push again."
        not_writable = f"{name} cannot be written with this token"
        problem, fix = {
            401: (f"{name}: {self.api.endpoint} rejects the token", _LOGIN),
            403: (not_writable, f"push to your own account, or {_LOGIN}"),
            404: (not_writable, f"push to your own account, or {_LOGIN}"),
            409: (f"{name} was changed by another commit in the meantime", _AGAIN),
            None: (f"{name}: {action} failed", f"fix the cause, then {_AGAIN}"),
        }.get(status, (f"{name}: {action} was rejected", _AGAIN))
        if status is None and is_network:
            problem = f"{endpoint} cannot be reached"
            fix = f"check address and network, then {_AGAIN}"
        return f"{problem} ({text}); {fix}."


def connect(repo_id: str, token: str | None, endpoint: str | None) -> Hub:
    """Check the name of the repository, the address of the Hub and the token. Send no request.

    Without `token`, HF_TOKEN or the token of ``hf auth login`` is used; without `endpoint`, HF_ENDPOINT or the public Hub.

    Raises:
        WandsError: if the name, the address or the token is invalid, there is no token, or offline mode is set.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise WandsError(
            f"REPO_ID {repo_id} is not a valid name of a repository; use owner/name. Owner and name each have up to 96 letters, "
            "digits, '-', '_' and '.'. They cannot contain '--' or '..', begin or end with '-' or '.', or end with '.git'."
        ) from None
    endpoint = endpoint or constants.ENDPOINT
    if not re.match(r"https?://\w", endpoint):
        raise WandsError(f"--endpoint {endpoint} is not a web address; write https://host.")
    if constants.HF_HUB_OFFLINE:
        raise WandsError(
            "HF_HUB_OFFLINE forbids every request to the Hub; unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to push."
        )
    try:
        secret = (token or get_token() or "").strip()
    except Exception as error:  # the class of an error in the stored login depends on the version
        raise WandsError(
            f"The Hub token cannot be read ({type(error).__name__}: {error}); {_LOGIN}."
        ) from error
    if not secret:
        raise WandsError(f"No Hub token was found for REPO_ID {repo_id}; {_LOGIN}.")
    if not re.fullmatch(r"[!-~]+", secret):  # the HTTP client's error would show the token
        raise WandsError(f"The Hub token contains spaces or invalid characters; {_LOGIN}.")
    set_client_factory(_build_client)
    api = HfApi(endpoint=endpoint, token=secret, library_name="wands", library_version=__version__)
    return Hub(api, repo_id)


def open_repository(hub: Hub, *, public: bool, revision: str | None) -> Hub:
    """Create the repository and its branch if they do not exist, and return `hub` with the full ``owner/name``.

    An existing repository keeps its visibility; a warning is logged if it differs from `public`. None as `revision` is ``main``.
    """
    if "/" not in hub.repo_id:
        owner = hub.call(
            "looking up your account", lambda: str(hub.api.whoami()["name"]), FIRST_CONTACT_WAITS
        )
        hub = replace(hub, repo_id=f"{owner}/{hub.repo_id}")
    api = hub.api
    repo_id = hub.repo_id
    exists = partial(api.repo_exists, repo_id)
    info = partial(api.model_info, repo_id)
    visibility, other = ("public", "private") if public else ("private", "public")
    if not hub.call("looking up the repository", exists, FIRST_CONTACT_WAITS):
        create = partial(api.create_repo, repo_id, private=not public, exist_ok=True)
        hub.call("creating the repository", create, FIRST_CONTACT_WAITS)
        log.info("created the %s repository %s", visibility, repo_id)
    elif hub.call("looking up the repository", info, FIRST_CONTACT_WAITS).private == public:
        log.warning("the repository %s is %s, not %s; wands does not change this", repo_id, other, visibility)
    if revision and revision != "main" and not revision.startswith("refs/"):
        branch = partial(api.create_branch, repo_id, branch=revision, exist_ok=True)
        hub.call(f"creating the branch {revision}", branch, FIRST_CONTACT_WAITS)
    return hub


def _is_same(operation: CommitOperationAdd, stored: Any) -> bool:
    if stored is None or stored.size != operation.upload_info.size:
        return False
    return stored.lfs is None or stored.lfs.sha256 == operation.upload_info.sha256.hex()


def _build_client() -> Any:
    """Return the Hub client's default HTTP client, with limits also for requests that set no limit."""
    client = default_client_factory()

    def limit_time(request: Any) -> None:
        limits = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: limits.get(name) or ANSWER_SECONDS for name in names}

    hooks = client.event_hooks
    client.event_hooks = {**hooks, "request": [*hooks["request"], limit_time]}
    return client


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code
    # The errors of a Xet transfer contain the status only in their text.
    match = re.search(r"HTTP status (?:client|server) error \((\d{3})", str(error))
    return int(match[1]) if match else None
