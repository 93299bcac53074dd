"""A Ray cluster of two nodes on this machine, with `shmserve.ray` on both. This is a program,
because Ray runs in the process that starts it.

    python tests/rigs/ray_cluster.py FOLDER PORT '{"model-repository": ...}'

It prints "ready" once both nodes serve, kills the second one at the word "kill" (and prints
"killed"), and ends all at the end of its input. The environment variable NODE of a node's server
and models is the node's name.
"""

import json
import os
import sys
from pathlib import Path

# These are set before Ray is imported: no usage reports, and a proxy without a preferred node.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"

import ray
from ray import serve
from ray.cluster_utils import Cluster

from shmserve.ray import application

_OBJECTS_BYTE_SIZE = 80 << 20  # the least that Ray takes
_HOST = "127.0.0.1"
_ADDRESSES = {"first": "127.0.0.2", "second": "127.0.0.3"}


def node(folder: Path, name: str) -> dict[str, object]:
    """Return the settings of a node: its server's run directory and its name."""
    run_dir = folder / name
    run_dir.mkdir()
    return {
        "num_cpus": 2,
        "object_store_memory": _OBJECTS_BYTE_SIZE,
        "include_log_monitor": False,
        "node_ip_address": _ADDRESSES[name],
        "env_vars": {"NODE": name, "XDG_RUNTIME_DIR": str(run_dir), "TMPDIR": str(run_dir)},
    }


def main(folder: Path, port: int, flags: dict[str, object]) -> None:
    """Run the program that the module describes."""
    head = {**node(folder, "first"), "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second_node = cluster.add_node(**node(folder, "second"))
    ray.init(address=cluster.address)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": _HOST, "port": port})
        serve.run(
            application(flags, num_replicas=2, graceful_shutdown_wait_loop_s=0.1), name="shmserve"
        )
        print("ready", flush=True)
        for word in sys.stdin:
            assert word == "kill\n"
            cluster.remove_node(second_node, allow_graceful=False)
            print("killed", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
