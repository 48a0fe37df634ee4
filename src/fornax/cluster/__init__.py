"""One command on many hosts: launch, watch, recover. Hosts are processes here, or Ray's nodes."""

from fornax.cluster.client import Cluster, Run
from fornax.cluster.controller import Job
from fornax.cluster.drill import drill
from fornax.cluster.launch import launch, open_engine
from fornax.cluster.slices import launch_slices
from fornax.cluster.status import Status, hosts_at_work, read_events, read_status, resize
from fornax.cluster.storm import DrillOutcome, drills, storm
from fornax.cluster.verdict import Limits, Verdict

__all__ = [
    "Cluster",
    "DrillOutcome",
    "Job",
    "Limits",
    "Run",
    "Status",
    "Verdict",
    "drill",
    "drills",
    "hosts_at_work",
    "launch",
    "launch_slices",
    "open_engine",
    "read_events",
    "read_status",
    "resize",
    "storm",
]
