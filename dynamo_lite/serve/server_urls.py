"""Where the URLs of NATS and etcd may have a password: only where no other user can read them.

The arguments of a process are visible to all users of its machine, and configuration files are
copied and printed (`--dry-run`).
"""

from collections.abc import Mapping

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.runtime.address import has_credentials, redact
from dynamo_lite.serve.document import Document

#: Option to the variable that may be set in its place. Variables may have passwords: only
#: processes of the same user can read them.
VARIABLES: Mapping[str, str] = {
    "nats-url": "DYNAMO_LITE_NATS_URL",
    "etcd-url": "DYNAMO_LITE_ETCD_URL",
}


def check_argument(option: str, url: str) -> None:
    """Raises ConfigError if `url`, given on the command line as `--option`, has credentials."""
    if has_credentials(url):
        raise ConfigError(
            [
                f"--{option} {redact(url)}: it has credentials before the @, which all users of"
                f" this machine can read in the list of processes; {_instead(option)}"
            ]
        )


def check_document(document: Document) -> None:
    """Complains of keys and variables of the document that are to name a server."""
    for name, section in document.tree.items():
        if not isinstance(section, dict):
            continue
        for option in [option for option in VARIABLES if option in section]:
            # Otherwise the key is complained of again, as an unknown one.
            del section[option]
            _complain(document, (str(name), option), option)
        args = section.get("ServiceArgs")
        env = args.get("env") if isinstance(args, dict) else None
        for option, variable in VARIABLES.items():
            if isinstance(env, dict) and variable in env:
                _complain(document, (str(name), "ServiceArgs", "env", variable), option)


def _complain(document: Document, path: tuple[str, ...], option: str) -> None:
    document.complain(
        path, f"servers are named with --{option}, not in the configuration; {_instead(option)}"
    )


def _instead(option: str) -> str:
    return (
        "put a password into a file that only you can read and write ?login=FILE behind the host,"
        f" or set the variable {VARIABLES[option]} of the command `dynamo-lite`"
    )
