"""`fornax host status`, `load`, `unload`, `rollback` and related commands: requests to a running
server."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT, Control
from fornax.cli.host_report import head_line, shadow_lines, status_lines
from fornax.config import ConfigError, environment
from fornax.serving.client import V2Client, parse_server, tls_context, wait_until_ready

_MODEL = arg(metavar="MODEL", help_behavior_hint="")
_DEFAULT = "127.0.0.1:8080"
_HELP = """{summary}

    A server that needs a token gets the first of FORNAX_HOST_TOKEN.

    example:
      {example}
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What every command to a running server takes."""

    url: Annotated[str, arg(metavar="HOST:PORT")] = _DEFAULT
    """The server's HTTP address; https://host:port for TLS."""
    ca: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File with the authority of its certificate (default: the system's)."""
    cert: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File with a certificate to present."""
    key: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File with its key (default: the certificate's file)."""
    insecure: Annotated[bool, NO_DEFAULT] = False
    """Do not check the server's certificate."""
    timeout: float = 600.0
    """Seconds to wait for the answer; loading a model takes as long as it takes."""
    json: Annotated[bool, NO_DEFAULT] = False
    """Print the server's answer as it is."""

    def client(self) -> V2Client:
        """The server."""
        secure = self.url.startswith("https://")
        return V2Client(
            address=parse_server(self.url, _DEFAULT),
            tls=tls_context(self.ca, self.insecure, self.cert, self.key) if secure else None,
            token=next(iter(environment.host_tokens()), None),
            timeout=self.timeout,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments(Arguments):
    """Of a command to one model."""

    model: Annotated[Positional[str], _MODEL] = ""
    """The model's name."""

    def path(self, verb: str) -> str:
        """Where the verb is posted to."""
        if not self.model:
            raise ConfigError("no model is named; write its name after the command")
        return f"/v2/repository/models/{quote(self.model, safe='')}/{verb}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionArguments(ModelArguments):
    """Of a command to one model or one version of it."""

    version: Annotated[str, arg(metavar="N", help_behavior_hint="")] = ""
    """One version (default: what the model's version policy says)."""

    def body(self) -> dict[str, Any]:
        """The body that names the version."""
        return {"parameters": {"version": self.version}} if self.version else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusArguments(Arguments):
    """Of a look at the server."""

    wait: Annotated[float, arg(metavar="SECONDS", help_behavior_hint="")] = 0.0
    """Wait so long for it to be ready, but no longer once nothing is loading that it lacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileArguments(Arguments):
    """Of a profile."""

    seconds: float = 5.0
    """How long to profile."""
    stop: Annotated[bool, NO_DEFAULT] = False
    """End the profile that runs."""


def _status(arguments: StatusArguments) -> int:
    client = arguments.client()
    ready = wait_until_ready(client, arguments.wait)
    index = client.post("/v2/repository/index")
    stats = client.get("/v2/models/stats")["model_stats"]
    if arguments.json:
        _say(json.dumps({"ready": ready, "models": index, "model_stats": stats}))
        return 0 if ready else 1
    _say(head_line("{}:{}".format(*client.address), ready, index))
    for line in status_lines(index, stats):
        _say(line)
    return 0 if ready else 1


def _load(arguments: VersionArguments) -> int:
    answer = arguments.client().post(arguments.path("load"), arguments.body())
    return _done(arguments, answer, f"{_named(arguments)} is loaded")


def _unload(arguments: VersionArguments) -> int:
    answer = arguments.client().post(arguments.path("unload"), arguments.body())
    return _done(arguments, answer, f"{_named(arguments)} is unloaded")


def _rollback(arguments: VersionArguments) -> int:
    answer = arguments.client().post(arguments.path("rollback"), arguments.body())
    until = "" if answer.get("persistent", True) else "the server restarts, or "
    words = (
        f"{arguments.model}: version {answer.get('version')} serves in place of "
        f"{answer.get('previous')}; newer versions wait until {until}fornax host release "
        f"{arguments.model}"
    )
    return _done(arguments, answer, words)


def _release(arguments: ModelArguments) -> int:
    answer = arguments.client().post(arguments.path("release"))
    words = f"{arguments.model}: its version policy chooses what serves again"
    return _done(arguments, answer, words)


def _shadow(arguments: ModelArguments) -> int:
    report = arguments.client().get(arguments.path("shadow"))
    if arguments.json:
        _say(json.dumps(report))
        return 0
    for line in shadow_lines(report):
        _say(line)
    return 0


def _profile(arguments: ProfileArguments) -> int:
    asked: dict[str, Any] = {"stop": True} if arguments.stop else {"seconds": arguments.seconds}
    answer = arguments.client().post("/v2/profile", asked)
    state = "is being written to" if answer.get("running") else "is in"
    return _done(arguments, answer, f"the profile {state} {answer.get('directory')}")


def _done(arguments: Arguments, answer: object, words: str) -> int:
    _say(json.dumps(answer) if arguments.json else words)
    return 0


def _named(arguments: VersionArguments) -> str:
    return f"{arguments.model} {arguments.version}".strip()


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)  # noqa: T201


_COMMANDS: dict[str, tuple[type[Arguments], Callable[[Any], int], str, str]] = {
    "status": (
        StatusArguments,
        _status,
        "Show what a running server serves and its state; exits 1 when it is not ready.",
        "fornax host status --url 127.0.0.1:8080 --wait 60",
    ),
    "load": (
        VersionArguments,
        _load,
        "Load a model, or one version of it, and wait until it serves.",
        "fornax host load ranker --version 4",
    ),
    "unload": (
        VersionArguments,
        _unload,
        "Answer what a model accepted and unload it, or one version of it.",
        "fornax host unload ranker --version 3",
    ),
    "rollback": (
        VersionArguments,
        _rollback,
        "Let the version before the newest serve, or the one named, and hold newer ones back.",
        "fornax host rollback ranker",
    ),
    "release": (
        ModelArguments,
        _release,
        "End a rollback: newer versions may serve again.",
        "fornax host release ranker",
    ),
    "shadow": (
        ModelArguments,
        _shadow,
        "Report how a shadow version's answers differ from those of the serving one.",
        "fornax host shadow ranker",
    ),
    "profile": (
        ProfileArguments,
        _profile,
        "Profile a running server for some seconds, into its --profile-dir.",
        "fornax host profile --seconds 5",
    ),
}


def command(name: str) -> Control:
    """The command of that name."""
    cls, run, summary, example = _COMMANDS[name]
    text = _HELP.format(summary=summary, example=example)
    return Control(type("Arguments", (cls,), {"__doc__": text}), run)
