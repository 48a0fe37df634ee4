"""A Ray cluster of emulated nodes: prints its address, and ends when its input does.

Its first node has no processors to give, each of the others as many as are asked for: the nodes of
other machines, as far as one machine can play them.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    count, processors = map(int, sys.argv[1:])
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(count):
        nodes.add_node(num_cpus=processors)
    nodes.wait_for_nodes()
    print(nodes.address, flush=True)
    sys.stdin.read()
    nodes.shutdown()
