"""`fornax profile serve`: a running server, captured for some seconds."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.commands import profile_show
from fornax.config import ConfigError, ServingCode, ServingError, environment
from fornax.serving.client import V2Client, parse_server, tls_context

_DEFAULT = "http://127.0.0.1:8000"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Capture a profile of a running server: its engine, its threads, its requests.

    The server, of fornax serve or fornax host,  On the same machine it is shown, and copied with
    --out. A server that needs a key gets OPENAI_API_KEY or the first of FORNAX_HOST_TOKEN.

    examples:
      fornax profile serve --url http://127.0.0.1:8000 --seconds 5
      fornax profile serve --seconds 2 --out prof/
    """

    url: Annotated[str, arg(metavar="URL")] = _DEFAULT
    """The server's HTTP address; https://host:port for TLS."""
    seconds: float = 5.0
    """How long to capture; the server's --profile-max-seconds at most."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Copy the capture here, from a server on the same machine."""
    ca: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File with the authority of its certificate (default: the system's)."""
    insecure: Annotated[bool, NO_DEFAULT] = False
    """Do not check the server's certificate."""


def run(arguments: Arguments) -> int:
    """Start, wait, stop, show."""
    if not 0 < arguments.seconds <= 3600:
        raise ConfigError(f"seconds={arguments.seconds:g} must be above 0 and at most 3600")
    secure = arguments.url.startswith("https://")
    client = V2Client(
        address=parse_server(arguments.url, _DEFAULT),
        tls=tls_context(arguments.ca, arguments.insecure) if secure else None,
        token=environment.openai_api_key() or next(iter(environment.host_tokens()), None),
        timeout=60.0,
        started_by="fornax serve or fornax host --profile-dir DIR",
    )
    folder = Path(_captured(client, arguments.seconds)["directory"])
    if not folder.is_dir():
        where = f"the capture is in {folder} on the server's machine"
        if arguments.out is not None:
            raise ConfigError(f"{where}, which is not this one; copy it from there")
        print(f"{where}; copy it here for fornax profile show")  # noqa: T201
        return 0
    if arguments.out is not None:
        copy = arguments.out / "plugins" / "profile" / folder.name
        try:
            folder = Path(shutil.copytree(folder, copy))
        except OSError as error:
            raise ConfigError(
                f"cannot copy {folder} to {arguments.out}: {error}; choose another --out"
            ) from error
    print(f"the capture is in {folder}")  # noqa: T201
    return profile_show.run(profile_show.Arguments(directory=folder))


def _captured(client: V2Client, seconds: float) -> dict[str, Any]:
    """What the server says of the capture that it made."""
    try:
        client.post(f"/start_profile?seconds={seconds:g}")
        stop = ("/stop_profile", None)
    except ServingError as error:
        if error.code is not ServingCode.NOT_FOUND:
            raise
        try:
            client.post("/v2/profile", {"seconds": seconds})
        except ServingError as second:
            if second.code is not ServingCode.NOT_FOUND:
                raise
            raise ConfigError(
                "the server makes no profiles; start it with --profile-dir DIR"
            ) from None
        stop = ("/v2/profile", {"stop": True})
    time.sleep(seconds)
    return client.post(*stop)
