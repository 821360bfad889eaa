"""A Hugging Face Hub small enough to read: what `wands push` and a download need, over real HTTP on loopback.

It keeps repositories, branches and LFS objects in memory, checks tokens, notes requests, breaks on demand.
Written from the requests that huggingface_hub 2.4.0 makes; Xet is not served (`HF_HUB_DISABLE_XET=1`, or
`lfs_from=None` so that no file asks for large storage).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """Hash that the server compares: sha256 of a large file, git's blob hash of a small one."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, File]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)

    def sha(self, branch: str) -> str:
        files = sorted((path, file.oid) for path, file in self.branches[branch].items())
        return hashlib.sha1(json.dumps([len(self.messages), files]).encode()).hexdigest()


@dataclass(frozen=True)
class Fault:
    """Fault of one request: the answer is `status`, or the server hangs up when it is None.

    `after` lets the request take effect first: the answer alone is lost. `body` is sent as it is, in place of the right answer.
    `silence` is how many seconds nothing is sent.
    """

    status: int | None
    after: bool = False
    text: str = "out of order"
    body: bytes | None = None
    silence: float = 0.0


class Refused(Exception):
    def __init__(self, status: int, code: str = "", text: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text


class FakeHub:
    """`with FakeHub() as hub:` serves at `hub.url`.

    Attributes:
        tokens: token -> account; an account writes to its own name only.
        repos: ``owner/name`` -> repository.
        requests: (kind, path, body bytes) of every request so far.
        ignored: names that a `.gitignore` of every repository lists.
    """

    def __init__(self, tokens: dict[str, str], *, lfs_from: int | None = 20_000) -> None:
        self.tokens = tokens
        self.lfs_from = lfs_from
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.faults: dict[str, list[Fault]] = {}
        self.ignored: tuple[str, ...] = ()
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, kind: str, status: int | None, times: int = 1, **more: object) -> None:
        self.faults.setdefault(kind, []).extend([Fault(status, **more)] * times)

    def count(self) -> Counter[str]:
        return Counter(kind for kind, _, _ in self.requests)

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        return {path: file.data for path, file in self.repos[repo_id].branches[branch].items()}


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    ("whoami", "GET", r"/api/whoami-v2"),
    ("validate", "POST", r"/api/validate-yaml"),
    ("create", "POST", r"/api/repos/create"),
    ("preupload", "POST", rf"/api/models/{_REPO}/preupload/(?P<rev>[^/]+)"),
    ("commit", "POST", rf"/api/models/{_REPO}/commit/(?P<rev>[^/]+)"),
    ("branch", "POST", rf"/api/models/{_REPO}/branch/(?P<rev>[^/]+)"),
    ("tree", "GET", rf"/api/models/{_REPO}/tree/(?P<rev>[^/]+)"),
    ("info", "GET", rf"/api/models/{_REPO}(?:/revision/(?P<rev>[^/]+))?"),
    ("batch", "POST", rf"/{_REPO}\.git/info/lfs/objects/batch"),
    ("put", "PUT", r"/lfs/(?P<oid>[0-9a-f]{64})"),
    ("verify", "POST", r"/lfs-verify/(?P<oid>[0-9a-f]{64})"),
    ("resolve", "HEAD", rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
    ("resolve", "GET", rf"/{_REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the client's ACK
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = self._read_chunks()
        path = urlsplit(self.path).path
        kind, groups = next(
            (
                (kind, match.groupdict())
                for kind, method, pattern in _ROUTES
                if method == self.command and (match := re.fullmatch(pattern, path))
            ),
            ("unknown", {}),
        )
        with self.hub.lock:
            self.hub.requests.append((kind, path, len(body)))
            waiting = self.hub.faults.get(kind)
            fault = waiting.pop(0) if waiting else None
            try:
                answer = None if fault and not fault.after else self._answer(kind, groups, body)
            except Refused as refused:
                fault = None
                answer = refused
        if fault:
            time.sleep(fault.silence)
        if fault and fault.body is not None:
            return self._send((fault.body, {}))
        if fault and fault.status is None:
            self.close_connection = True
            return
        self._send(Refused(fault.status, text=fault.text) if fault else answer)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _read_chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, answer: object) -> None:
        headers = {}
        if isinstance(answer, Refused):
            status = answer.status
            data = json.dumps({"error": answer.text}).encode()
            headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.text}
        elif isinstance(answer, tuple):
            status = 200
            data = answer[0]
            headers = answer[1]
        else:
            status = 200
            data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, kind: str, groups: dict[str, str | None], body: bytes) -> object:
        if kind == "unknown":
            raise Refused(404, text=f"the fake hub has no {self.command} {self.path}")
        if kind in ("put", "verify"):  # signed addresses on the real Hub: no token
            return self._store(kind, str(groups["oid"]), body)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        account = self.hub.tokens.get(token)
        if token and account is None:
            raise Refused(401, text="Invalid credentials in Authorization header")
        rev = unquote(groups.get("rev") or "main")
        repo = self._repo(groups["repo"], account, rev, kind) if "repo" in groups else None
        return getattr(self, f"_{kind}")(account, repo, groups, rev, body)

    def _repo(self, repo_id: str | None, account: str | None, rev: str, kind: str) -> Repo:
        repo = self.hub.repos.get(str(repo_id))
        owner = str(repo_id).split("/")[0]
        if repo is None or (repo.private and account != owner):
            raise Refused(404, "RepoNotFound", "Repository not found")
        if kind in ("preupload", "commit", "branch", "batch") and account != owner:
            raise Refused(403, text="You do not have write access to this repository")
        if kind != "branch" and rev not in repo.branches and rev not in map(repo.sha, repo.branches):
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        return repo

    def _store(self, kind: str, oid: str, body: bytes) -> object:
        if kind == "verify" and oid not in self.hub.objects:
            raise Refused(404, text="no such object")
        if kind == "put":
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refused(400, text="content does not match its address")
            self.hub.objects[oid] = body
        return {}

    def _whoami(self, account, repo, groups, rev, body):
        if account is None:
            raise Refused(401, text="no token")
        return {"name": account, "type": "user", "orgs": []}

    def _validate(self, account, repo, groups, rev, body):
        head = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        try:
            valid = head is None or isinstance(yaml.safe_load(head[1]), dict)
        except yaml.YAMLError:
            valid = False
        if not valid:
            raise Refused(400, text="the head of README.md is no YAML mapping")
        return {"warnings": [], "errors": []}

    def _create(self, account, repo, groups, rev, body):
        asked = json.loads(body)
        owner = asked["organization"] or account
        if account is None:
            raise Refused(401, text="no token")
        if owner != account:
            raise Refused(403, text=f'You don\'t have the rights to create a model under "{owner}"')
        repo_id = f"{owner}/{asked['name']}"
        if repo_id in self.hub.repos:
            raise Refused(409, text="You already created this model repo")
        self.hub.repos[repo_id] = Repo(private=asked.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}

    def _branch(self, account, repo, groups, rev, body):
        if rev in repo.branches:
            raise Refused(409, text="Reference already exists")
        repo.branches[rev] = dict(repo.branches["main"])
        return {}

    def _files(self, repo: Repo, rev: str) -> dict[str, File]:
        branch = rev if rev in repo.branches else next(b for b in repo.branches if repo.sha(b) == rev)
        return repo.branches[branch]

    def _info(self, account, repo, groups, rev, body):
        files = self._files(repo, rev)
        sha = repo.sha(rev) if rev in repo.branches else rev
        readme = files["README.md"].data.decode() if "README.md" in files else ""
        head = re.match(r"---\n(.*?)\n---\n", readme, re.DOTALL)
        siblings = [{"rfilename": path} for path in files]
        card = yaml.safe_load(head[1]) if head else None
        named = {"id": groups["repo"], "modelId": groups["repo"], "private": repo.private, "tags": []}
        return {**named, "sha": sha, "siblings": siblings, "cardData": card}

    def _tree(self, account, repo, groups, rev, body):
        rows = []
        for path, file in self._files(repo, rev).items():
            row = {"type": "file", "path": path, "size": len(file.data), "oid": file.oid[:40]}
            rows.append(
                row
                | ({"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 134}} if file.lfs else {})
            )
        return rows

    def _preupload(self, account, repo, groups, rev, body):
        known = repo.branches[rev]
        answer = []
        for item in json.loads(body)["files"]:
            large = self.hub.lfs_from is not None and item["size"] >= self.hub.lfs_from
            file = known.get(item["path"])
            mode = {"path": item["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            mode["shouldIgnore"] = item["path"] in self.hub.ignored
            answer.append(mode | {"oid": file.oid if file else None})
        return {"files": answer}

    def _batch(self, account, repo, groups, rev, body):
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.hub.objects:
                actions = {"upload": "lfs", "verify": "lfs-verify"}
                hrefs = {name: {"href": f"{self.hub.url}/{at}/{item['oid']}"} for name, at in actions.items()}
                item = {**item, "actions": hrefs}
            objects.append(item)
        return {"transfer": "basic", "objects": objects}

    def _commit(self, account, repo, groups, rev, body):
        files = dict(repo.branches[rev])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refused(400, text="commit of an object that was never stored")
                files[value["path"]] = File(self.hub.objects[value["oid"]], lfs=True)
            else:
                raise Refused(400, text=f"the fake hub does not know {line['key']}")
        repo.branches[rev] = files
        repo.messages.append(message)
        return {
            "commitOid": repo.sha(rev),
            "commitUrl": f"{self.hub.url}/{groups['repo']}/commit/{repo.sha(rev)}",
        }

    def _resolve(self, account, repo, groups, rev, body):
        file = self._files(repo, rev).get(unquote(str(groups["path"])))
        if file is None:
            raise Refused(404, "EntryNotFound", "Entry not found")
        sha = repo.sha(rev) if rev in repo.branches else rev
        return file.data, {"X-Repo-Commit": sha, "ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
