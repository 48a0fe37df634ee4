"""`fornax ui`: one local page over run directories."""

import dataclasses
import ipaddress
import secrets
import webbrowser
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.registry import extra
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show the runs below a folder as a live local web page, without account or database.

    Training, post-training, servers (--run-dir), quantization and launched runs, as their
    directories are. The page only reads; with --control it may ask a run for a profile, a
    checkpoint or a stop, and asks for a token. Ctrl-C ends it.

    examples:
      fornax ui runs/
      fornax ui runs/ --port 8080 --open
      fornax ui runs/ --control
      fornax ui runs/ --host 0.0.0.0 --token-file tokens.txt
    """

    runs: Annotated[Positional[Path], arg(metavar="RUNS")]
    """Folder of run directories, or a run directory."""
    port: int = 7007
    """Port of the page; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own needs --token-file."""
    control: Annotated[bool, NO_DEFAULT] = False
    """Let the page ask runs for a profile, a checkpoint or a stop; a token is made for this start
    unless --token-file gives one."""
    token_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """File of tokens, one per line, one of which the page asks for."""
    open: Annotated[bool, NO_DEFAULT] = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} must be in [0, 65536)")
        if not _is_own(self.host) and self.token_file is None:
            raise ConfigError(
                f"--host {self.host} lets other machines in; name a file of tokens with "
                "--token-file, or leave --host out and forward the port (ssh -L)"
            )


def run(arguments: Arguments) -> int:
    """Serve the page until Ctrl-C."""
    with extra("serve", "ui"):
        from fornax.dashboard import serve
    from fornax.serving.access import Auth, read_tokens

    made = ""
    tokens: tuple[str, ...] = ()
    if arguments.token_file is not None:
        tokens = tuple(read_tokens("token_file", arguments.token_file))
    elif arguments.control:
        made = secrets.token_urlsafe(24)
        tokens = (made,)

    def ready(where: str) -> None:
        address = f"http://{where}/" + (f"#token={made}" if made else "")
        print(f"{arguments.runs} is shown at {address}", flush=True)  # noqa: T201
        if arguments.open:
            webbrowser.open(address)

    return serve(
        arguments.runs,
        host=arguments.host,
        port=arguments.port,
        auth=Auth(tokens=tokens),
        control=arguments.control,
        ready=ready,
    )


def _is_own(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
