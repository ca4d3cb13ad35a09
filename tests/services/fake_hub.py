"""The Hugging Face Hub's HTTP API, as far as huggingface_hub needs it to push a model and to load models and data sets
by their ids. It takes files of every size in the commit itself, not by Git LFS or Xet.

with FakeHub() as hub:
    hub.put("jane/texts", {"train.csv": b"..."}, kind="datasets")
    subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from services.process import HttpService

TOKEN = "hf_" + "FakeTokenOfTheTests"
READ_TOKEN = "hf_" + "FakeTokenThatOnlyReads"
USER, ORGANISATION = "jane", "lab"
REPO = r"/(?:(?P<kind>datasets)/)?(?P<id>[^/]+(?:/[^/]+)?)"
API = r"/api/(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)"


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # their messages

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((len(self.commits), sorted(self.files))).encode()).hexdigest()


@dataclass
class Request:
    path: str
    authorization: str | None


@dataclass
class Answer(Exception):
    status: int
    body: Any = None  # bytes, or what becomes JSON
    headers: dict[str, str] = field(default_factory=dict)


class FakeHub(HttpService):
    def __init__(self) -> None:
        super().__init__(Handler)
        self.repos: dict[tuple[str, str], Repo] = {}  # of a kind (models, datasets) and id
        self.requests: list[Request] = []  # in the order they came
        self.faults: dict[
            str, int
        ] = {}  # part of a path: the status that is answered instead; 0: nothing is, ever

    def put(
        self, repo_id: str, files: dict[str, bytes], *, kind: str = "models", private: bool = False
    ) -> None:
        """A repository with these files, or more files for it."""
        repo = self.repos.setdefault((kind, repo_id), Repo(private))
        repo.files |= files
        repo.commits.append("put")

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that uses this Hub instead of the real one, with no caches but those in `home`."""
        hub = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        return {**hub, "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class Handler(BaseHTTPRequestHandler):
    service: FakeHub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.service.requests.append(Request(self.path, self.headers.get("Authorization")))
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        try:
            broken = next(
                (status for part, status in self.service.faults.items() if part in self.path), None
            )
            if broken == 0:
                self.service.ends.wait()
                self.close_connection = True
                return
            if broken is not None:
                raise Answer(broken, {"error": "as the test wants it"})
            raise self.route(unquote(urlsplit(self.path).path), body)
        except Answer as answer:
            content = (
                answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            )
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    do_GET = do_HEAD = do_POST = answer

    def route(self, path: str, body: bytes) -> Answer:
        for method, pattern, act in ROUTES:
            match = re.fullmatch(pattern, path)
            if match is not None and self.command in method:
                return act(self, body, **match.groupdict())
        return error(404, "", f"no such page: {self.command} {path}")

    def token(self, *, writes: bool = False) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_TOKEN):
            raise Answer(401, {"error": "Invalid username or password."})
        if writes and token != TOKEN:
            raise Answer(403, {"error": "This token may only read"})
        return token

    def repo(self, kind: str | None, repo_id: str, revision: str = "main") -> Repo:
        """What a client with this token sees."""
        repo = self.service.repos.get((kind or "models", repo_id))
        if repo is None or (repo.private and self.headers.get("Authorization") is None):
            raise error(
                404 if self.headers.get("Authorization") else 401,
                "RepoNotFound",
                "Repository not found",
            )
        if revision not in ("main", repo.sha, "refs/convert/parquet"):
            raise error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo

    def log_message(self, *_: object) -> None:
        """Tests look at `requests`."""


def error(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})


# ---- pushing -------------------------------------------------------------------------------------------------------


def create(handler: Handler, body: bytes) -> Answer:
    handler.token(writes=True)
    asked = json.loads(body)
    owner = asked.get("organization") or USER
    kind = f"{asked.get('type', 'model')}s"
    if owner not in (USER, ORGANISATION):
        return Answer(
            403,
            {"error": f"You don't have the rights to create a {kind} under the namespace {owner}"},
        )
    repo_id = f"{owner}/{asked['name']}"
    url = {"url": f"{handler.service.endpoint}/{repo_id}", "name": repo_id}
    if (kind, repo_id) in handler.service.repos:
        return Answer(409, {**url, "error": "You already created this repo"})
    handler.service.repos[kind, repo_id] = Repo(
        asked.get("visibility") == "private" or bool(asked.get("private"))
    )
    return Answer(200, url)


def validate_yaml(handler: Handler, body: bytes) -> Answer:
    """The card's head: YAML, and results that say of what and on what they are."""
    content = json.loads(body)["content"]
    try:
        values = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
        for model in values.get("model-index", ()):
            for result in model["results"]:
                dataset = result["dataset"]
                assert (
                    model["name"]
                    and result["task"]["type"]
                    and dataset["type"]
                    and dataset["name"]
                )
                assert all({"type", "value"} <= metric.keys() for metric in result["metrics"])
    except (yaml.YAMLError, AssertionError, KeyError, TypeError) as reason:
        return Answer(
            400, {"errors": [{"message": f"{type(reason).__name__}: {reason}"}], "warnings": []}
        )
    return Answer(200, {"errors": [], "warnings": []})


def preupload(handler: Handler, body: bytes, kind: str, id: str, revision: str) -> Answer:
    handler.token(writes=True)
    handler.repo(kind, id, revision)
    paths = [file["path"] for file in json.loads(body)["files"]]
    how = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
    return Answer(200, {"files": [{"path": path, **how} for path in paths]})


def commit(handler: Handler, body: bytes, kind: str, id: str, revision: str) -> Answer:
    handler.token(writes=True)
    repo = handler.repo(kind, id, revision)
    header, *operations = (json.loads(line) for line in body.splitlines())
    files = [operation["value"] for operation in operations if operation["key"] == "file"]
    if len(files) < len(operations):
        return Answer(400, {"error": f"cannot commit {operations}"})
    repo.files |= {file["path"]: base64.b64decode(file["content"]) for file in files}
    repo.commits.append(header["value"]["summary"])
    return Answer(
        200,
        {"commitUrl": f"{handler.service.endpoint}/{id}/commit/{repo.sha}", "commitOid": repo.sha},
    )


# ---- loading -------------------------------------------------------------------------------------------------------


def info(handler: Handler, body: bytes, kind: str, id: str, revision: str = "main") -> Answer:
    repo = handler.repo(kind, id, revision)
    siblings = [{"rfilename": name} for name in sorted(repo.files)]
    known = {
        "id": id,
        "sha": repo.sha,
        "private": repo.private,
        "siblings": siblings,
        "tags": [],
        "downloads": 0,
    }
    return Answer(200, {**known, "modelId": id, "gated": False, "disabled": False, "likes": 0})


def tree(
    handler: Handler, body: bytes, kind: str, id: str, revision: str, folder: str | None = None
) -> Answer:
    repo = handler.repo(kind, id, revision)
    prefix = f"{folder}/" if folder else ""
    inside = {
        name: content for name, content in sorted(repo.files.items()) if name.startswith(prefix)
    }
    if prefix and not inside:
        return error(404, "EntryNotFound", f"{folder} does not exist")
    about = [
        (name, len(content), hashlib.sha1(content).hexdigest()) for name, content in inside.items()
    ]
    return Answer(
        200,
        [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in about],
    )


def resolve(
    handler: Handler, body: bytes, kind: str | None, id: str, revision: str, name: str
) -> Answer:
    repo = handler.repo(kind, id, revision)
    headers = {"X-Repo-Commit": repo.sha}
    if name not in repo.files:
        missing = error(404, "EntryNotFound", "Entry not found")
        return Answer(404, missing.body, {**headers, **missing.headers})
    content = repo.files[name]
    return Answer(200, content, {**headers, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})


ROUTES: list[tuple[tuple[str, ...], str, Any]] = [
    (("POST",), "/api/repos/create", create),
    (("POST",), "/api/validate-yaml", validate_yaml),
    (("POST",), API + "/preupload/(?P<revision>[^/]+)", preupload),
    (("POST",), API + "/commit/(?P<revision>[^/]+)", commit),
    (("GET",), API, info),
    (("GET",), API + "/revision/(?P<revision>.+)", info),
    (("GET",), API + "/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", tree),
    (("GET", "HEAD"), REPO + "/resolve/(?P<revision>[^/]+)/(?P<name>.+)", resolve),
]
