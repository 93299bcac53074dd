"""shmserve on more than one host: a Ray Serve application with one server a node (extra `ray`).

    client ── HTTP ── Ray's proxy ──┬── Node, on one node ────── its shmserve, by a unix socket
                                    └── Node, on another one ─── its shmserve

node.py    the deployment's class: a replica is a node's server
server.py  the server of a node: started, or found; asked; ended
launch.py  the process in which it is started
routes.py  what is passed on, and what only a node itself can answer

What goes between Ray's processes is packed by Ray, with pickle; between those of shmserve there is
none here either. Ray is imported when an application is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidArgument
from shmserve.ray import server
from shmserve.ray.node import Node

if TYPE_CHECKING:
    from ray import serve

# What Ray's defaults are wrong for. It lets five requests at once into a replica, of which no
# batches can be made: here shmserve's own queues, and their limits, are what requests meet.
SETTINGS = {
    "max_ongoing_requests": 1024,
    "max_replicas_per_node": 1,
    "graceful_shutdown_timeout_s": 40.0,  # longer than --exit-timeout-secs
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 10.0,
}


def app(args: Mapping[str, Any]) -> serve.Application:
    """What `serve run shmserve.ray:app` builds, and the `import_path` of a configuration file.

    args: the flags of `shmserve serve`, by their names as in the file of `--config`; or `server`
    alone, the unix socket where the HTTP of each node's own server listens.
    Raises InvalidArgument for flags that there are not, or that are wrong, and ImportError without
    the extra `ray`."""
    return application(args)


def application(args: Mapping[str, Any], **options: Any) -> serve.Application:
    """`app`, for Python; `options` are those of `ray.serve.deployment`, and stand in the place of
    SETTINGS."""
    if "server" not in args:
        server.check(args)
    elif len(args) > 1:
        others = ", ".join(sorted(args.keys() - {"server"}))
        raise InvalidArgument(f"server: a server that is there has its own flags; found {others}")
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError("shmserve.ray needs Ray Serve: install shmserve[ray]") from error
    return serve.deployment(name="Node", **{**SETTINGS, **options})(Node).bind(dict(args))
