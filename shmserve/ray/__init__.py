"""shmserve on more than one host: a Ray Serve application with one server per node (extra `ray`).

    client ── HTTP ── Ray's proxy ──┬── Node, on one node ────── its shmserve, by a unix socket
                                    └── Node, on another one ─── its shmserve

server.py  the deployment's class, `Node`: a replica is the server of a node, started or existing
launch.py  the process that starts a server

Ray uses pickle between its own processes; shmserve's processes use none. Ray is imported when an
application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidArgument, missing_package
from shmserve.ray import server
from shmserve.ray.server import Node

if TYPE_CHECKING:
    from ray import serve


# By default Ray sends five concurrent requests to a replica, too few for batches. Requests wait in
# shmserve's queues instead, within their limits.
SETTINGS = {
    "max_ongoing_requests": 1024,
    "max_replicas_per_node": 1,
    "graceful_shutdown_timeout_s": 40.0,  # must be longer than --exit-timeout-secs
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 10.0,
}


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of `serve run shmserve.ray:app`, and of an `import_path` in a file.

    Args:
        args: The flags of `shmserve serve` by name, as in the file of `--config`. Or `server`
            alone: the unix socket where the existing server of each node listens for HTTP.

    Raises:
        InvalidArgument: A flag is unknown or invalid.
        ImportError: The extra `ray` is not installed.
    """
    return application(args)


def application(args: Mapping[str, Any], **options: Any) -> serve.Application:
    """Build `app` in Python; `options` of `ray.serve.deployment` override SETTINGS."""
    if "server" not in args:
        server.check(args)
    elif len(args) > 1:
        names = ", ".join(sorted(args.keys() - {"server"}))
        raise InvalidArgument(f"server: flags cannot be set for a running server; found {names}")
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError(missing_package("shmserve.ray", error, "ray")) from error
    return serve.deployment(name="Node", **{**SETTINGS, **options})(Node).bind(dict(args))
