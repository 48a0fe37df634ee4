"""The one file that reads (and, before jax starts, writes) the process environment.

Every variable that Fornax reads has one function here; `documented()` lists them for the
reference page.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

__all__ = [
    "become",
    "cache_dir",
    "compilation_cache_enabled",
    "compiled_dir",
    "compiler_flags",
    "coordinator",
    "cpu_threads",
    "cxx",
    "documented",
    "epoch",
    "for_child",
    "full_traceback",
    "gce_metadata_server",
    "host_tokens",
    "launcher_variables",
    "leave_gpu_memory",
    "limit_cpu_threads",
    "local_checkpoints",
    "marked",
    "mlflow_credentials",
    "of_computation",
    "one_cpu_thread",
    "only_cpu",
    "openai_api_key",
    "preloading",
    "prepare_ray",
    "prepare_virtual_devices",
    "restart",
    "samplers",
    "set_default_platform_quiet",
    "slices",
    "snapshot_memory",
    "tpu_compiler",
    "trains_on_cpu",
    "usable_cores",
    "virtual_cpus",
    "visible_gpus",
    "vllm_plugins",
    "with_tunable",
    "worker_record",
]

_DOCUMENTED = {
    "FORNAX_CACHE_DIR": "Where compiled programs, native kernels and autotuned choices are kept "
    "(default: fornax/ under XDG_CACHE_HOME or ~/.cache).",
    "FORNAX_COMPILATION_CACHE": "0 turns the persistent compilation cache off (default: 1).",
    "FORNAX_TRACEBACK": "1 shows the whole traceback of an error (default: 0).",
    "FORNAX_COORDINATOR": "host:port of process 0 in a run of several processes.",
    "FORNAX_NUM_PROCESSES": "How many processes the run has.",
    "FORNAX_PROCESS_ID": "This process's number, from 0.",
    "FORNAX_SNAPSHOT_MEMORY": "Set by fornax launch: two files, with a colon between, of memory "
    "that outlives the process, for snapshots of its state.",
    "FORNAX_SNAPSHOT_REPLICAS": "Set by fornax launch: files, with colons between, of snapshots of "
    "other processes that this host holds.",
    "FORNAX_LOCAL_CHECKPOINTS": "Set by fornax launch --local-checkpoints: the directory of this "
    "host to which its agent copies snapshots.",
    "FORNAX_PROGRAM_MEMORY": "Set by fornax launch: a file of memory for compiled programs.",
    "FORNAX_DATA_WORKERS": "Set by fornax launch --data-workers: host:port of each, with commas "
    "between, or @ and a file with one per line.",
    "FORNAX_MTBF": "Set by fornax launch: mean seconds between failures of the run.",
    "FORNAX_WORKER_RECORD": "Set by fornax launch: the file in which a process says what it does; "
    "the coordination service is then the launcher's.",
    "FORNAX_EPOCH": "Set by fornax launch: the number of the group that this process belongs to; "
    "checkpoints of an earlier one are refused.",
    "FORNAX_SLICE": "Set by fornax launch --slices: which slice of a DiLoCo run this process "
    "belongs to, from 0.",
    "FORNAX_NUM_SLICES": "Set by fornax launch --slices: how many slices the run has.",
    "FORNAX_EXCHANGE": "Set by fornax launch --slices: host:port where slices exchange.",
    "FORNAX_EXCHANGE_TOKEN": "Set by fornax launch --slices: the token of that exchange.",
    "FORNAX_SAMPLERS": "Set by fornax launch --samplers: host:port of each sampler, with commas "
    "between, or @ and a file with one per line.",
    "JAX_COORDINATOR_ADDRESS": "With JAX_NUM_PROCESSES and JAX_PROCESS_ID, the same as the three "
    "above where those are not set. Next come MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK; what "
    "SLURM, Cloud TPU and Kubernetes set; fornax doctor shows what was found.",
    "JAX_COORDINATOR_PORT": "The port of process 0, where a launcher names only its host.",
    "FORNAX_HOST_TOKEN": "Tokens, with commas between, of which fornax host needs one from its "
    "clients; fornax host status, load and others, and fornax bench host send the first.",
    "VLLM_PLUGINS": "Plugins of vLLM, with commas between: with fornax among them vLLM runs over "
    "Fornax, without it vLLM stays as it is.",
    "GLIBC_TUNABLES": "fornax train, tune and quickstart add glibc.malloc.hugetlb=1 where they run "
    "on CPUs alone and Linux gives huge pages on request; glibc.malloc.hugetlb=0 keeps them "
    "off.",
    "LD_PRELOAD": "fornax train, tune and quickstart preload an allocator that keeps large blocks "
    "where they run on CPUs alone; a value of your own, even an empty one, keeps it out.",
    "MLFLOW_TRACKING_TOKEN": "The token that log.mlflow sends to its server; without it "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, where they are set.",
    "OPENAI_API_KEY": "The key that fornax bench serve sends, for a server that needs one.",
    "CXX": "The C++ compiler for native CPU kernels (default: c++, g++ or clang++, first found).",
}


def documented() -> dict[str, str]:
    """Name and meaning of every environment variable Fornax reads."""
    return dict(_DOCUMENTED)


def cache_dir() -> Path:
    """The folder for what can be made again: created by its users, safe to delete."""
    explicit = os.environ.get("FORNAX_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "fornax"
    try:
        return Path.home() / ".cache" / "fornax"
    except RuntimeError:  # no home directory: a container with an unknown user id
        return Path(tempfile.gettempdir()) / "fornax-cache"


def compiled_dir() -> Path:
    """The folder of jax's compilation cache, unless the user chose one.

    jax's keys leave the names of operations out, and a profile shows those that a program was
    compiled with: the folder's name changes when they do.
    """
    return cache_dir() / "xla-2"


def compilation_cache_enabled() -> bool:
    """Whether compiled programs are kept between processes."""
    return os.environ.get("FORNAX_COMPILATION_CACHE", "1") != "0"


def openai_api_key() -> str | None:
    """The key for an OpenAI-compatible server, if there is one."""
    return os.environ.get("OPENAI_API_KEY") or None


def mlflow_credentials() -> tuple[str, str, str]:
    """Token, user and password for an MLflow server; empty where there are none."""
    names = ("TOKEN", "USERNAME", "PASSWORD")
    token, user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in names)
    return token, user, password


def host_tokens() -> tuple[str, ...]:
    """The tokens of which the model server's clients must present one."""
    text = os.environ.get("FORNAX_HOST_TOKEN", "")
    return tuple(token.strip() for token in text.split(",") if token.strip())


def vllm_plugins() -> tuple[str, ...]:
    """The plugins that vLLM was told to load; none when it was given no list."""
    return tuple(os.environ.get("VLLM_PLUGINS", "").split(","))


def full_traceback() -> bool:
    """Whether errors show their traceback."""
    return os.environ.get("FORNAX_TRACEBACK", "0") not in ("", "0")


def cxx() -> str | None:
    """The compiler named by CXX, or None to look for one."""
    return os.environ.get("CXX") or None


def coordinator() -> dict[str, str]:
    """The variables that say by hand which process of a run this is; those that are set."""
    found = {
        "FORNAX_COORDINATOR": os.environ.get("FORNAX_COORDINATOR"),
        "FORNAX_NUM_PROCESSES": os.environ.get("FORNAX_NUM_PROCESSES"),
        "FORNAX_PROCESS_ID": os.environ.get("FORNAX_PROCESS_ID"),
    }
    return {name: value for name, value in found.items() if value}


def worker_record() -> Path | None:
    """The file in which `fornax launch` reads what it does."""
    path = os.environ.get("FORNAX_WORKER_RECORD")
    return Path(path) if path else None


def epoch() -> int:
    """The number of the group of `fornax launch` that this process belongs to; 0 without one."""
    return int(os.environ.get("FORNAX_EPOCH", "0"))


def slices() -> dict[str, str]:
    """The variables that say which slice of a DiLoCo run this is; those that are set."""
    found = {
        "FORNAX_SLICE": os.environ.get("FORNAX_SLICE"),
        "FORNAX_NUM_SLICES": os.environ.get("FORNAX_NUM_SLICES"),
        "FORNAX_EXCHANGE": os.environ.get("FORNAX_EXCHANGE"),
        "FORNAX_EXCHANGE_TOKEN": os.environ.get("FORNAX_EXCHANGE_TOKEN"),
    }
    return {name: value for name, value in found.items() if value}


def samplers() -> str:
    """Where the samplers of reinforcement learning are."""
    return os.environ.get("FORNAX_SAMPLERS", "")


def snapshot_memory() -> list[Path]:
    """The files `fornax launch` keeps snapshots in; none without it."""
    paths = os.environ.get("FORNAX_SNAPSHOT_MEMORY", "")
    return [Path(each) for each in paths.split(":") if each]


def mtbf() -> float:
    """Mean seconds between failures of the run, as `fornax launch` found it; a day without it."""
    return float(os.environ.get("FORNAX_MTBF", "86400"))


def snapshot_replicas() -> list[Path]:
    """The files in which `fornax launch` keeps snapshots of other processes on this host."""
    paths = os.environ.get("FORNAX_SNAPSHOT_REPLICAS", "")
    return [Path(each) for each in paths.split(":") if each]


def local_checkpoints() -> Path | None:
    """The directory of this host to which `fornax launch` copies snapshots; None: nowhere."""
    path = os.environ.get("FORNAX_LOCAL_CHECKPOINTS", "")
    return Path(path) if path else None


def data_workers() -> str:
    """Where the processes are that `fornax launch` started to read the input."""
    return os.environ.get("FORNAX_DATA_WORKERS", "")


def program_memory() -> Path | None:
    """The file in which `fornax launch` keeps a host's compiled programs."""
    path = os.environ.get("FORNAX_PROGRAM_MEMORY", "")
    return Path(path) if path else None


def only_cpu() -> bool:
    """Whether jax was told to look for no other devices than CPUs."""
    return os.environ.get("JAX_PLATFORMS", "") == "cpu"


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, or that the system has, by name."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in found]


def prepare_ray(token: str | None) -> None:
    """Set what Ray reads when it is imported, where the user has not: it sends no statistics.

    Args:
      token: of a Ray that this process starts; in the environment it leaves no file in the home
        directory, as Ray's own would. None: as the user has it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if token is not None:
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})


def of_computation() -> dict[str, str]:
    """What decides here how jax compiles and runs, for processes that another machine starts."""
    names = ("FORNAX_CACHE_DIR", "FORNAX_COMPILATION_CACHE", "LIBTPU_INIT_ARGS", "NPROC")
    return {
        name: value
        for name, value in os.environ.items()
        if (name in names or name.startswith(("JAX_", "XLA_"))) and name not in _LAUNCHERS
    }


def of_server() -> dict[str, str]:
    """As `of_computation`, with what a server takes from here: tokens, where models come from."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name == "FORNAX_HOST_TOKEN" or name.startswith("HF_")
    }
    return {**of_computation(), **own}


@contextlib.contextmanager
def marked(name: str, value: str) -> Iterator[None]:
    """Have the processes that are started meanwhile, and theirs, carry a variable."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def become(changes: Mapping[str, str]) -> None:
    """Set variables of this process, before jax starts its devices."""
    os.environ.update(changes)


_LAUNCHERS = (
    *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_PORT"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID"),
    *("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
    *("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
)


def launcher_variables() -> dict[str, str]:
    """What launchers of several processes left in the environment, by name."""
    return {name: os.environ[name] for name in _LAUNCHERS if os.environ.get(name)}


def gce_metadata_server() -> str | None:
    """The address of the virtual machine's metadata server, for a run on the TPUs of one."""
    has_tpu = any(Path(device).exists() for device in ("/dev/accel0", "/dev/vfio/0"))
    elsewhere = os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu"
    if not has_tpu or elsewhere or os.environ.get("TPU_SKIP_MDS_QUERY"):
        return None
    return os.environ.get("GCE_METADATA_IP") or "metadata.google.internal"


def for_child(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a child process: this one's, with `changes`; None leaves one out."""
    whole: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def tpu_compiler(accelerator: str) -> dict[str, str | None]:
    """What a child needs in its environment (see `for_child`) to compile for TPUs without one.

    Args:
      accelerator: Cloud's name for the slice, such as `v5p-128`.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": accelerator,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def virtual_cpus(count: int) -> dict[str, str | None]:
    """What a child needs in its environment (see `for_child`) to see `count` CPU devices."""
    flag = "--xla_force_host_platform_device_count"
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(f"{flag}=")]
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*others, f"{flag}={count}"]),
        "NPROC": _threads_for(count),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _threads_for(virtual_devices: int) -> str:
    return str(max(16, 2 * virtual_devices))


def compiler_flags() -> dict[str, str]:
    """The flags in the environment that change what XLA makes of a program."""
    names = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def prepare_virtual_devices() -> None:
    """Give XLA's CPU client enough threads when it plays more devices than there are cores.

    With fewer threads than virtual devices, steps dispatched without blocking wait for each other
    for ever. Call before jax starts its backend; a value set by the user stays.
    """
    match = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if match and int(match.group(1)) > (os.cpu_count() or 1):
        os.environ.setdefault("NPROC", _threads_for(int(match.group(1))))


def limit_cpu_threads(count: int) -> None:
    """Have XLA's CPU client divide a program over this many threads; call before jax starts it."""
    os.environ["NPROC"] = str(count)


def usable_cores() -> int:
    """The cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads() -> int:
    """Over how many threads XLA's CPU client divides a program."""
    chosen = os.environ.get("NPROC", "")
    return int(chosen) if chosen.isdecimal() else usable_cores()


@contextlib.contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Have the CPU client of XLA's that is made meanwhile run programs in the threads that call."""
    before = os.environ.get("NPROC")
    limit_cpu_threads(1)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


_ACCELERATORS = ("nvidia0", "kfd", "accel0", "vfio/0")


def trains_on_cpu() -> bool:
    """Whether what this process trains lies in memory that glibc gives out."""
    elsewhere = any((Path("/dev") / name).exists() for name in _ACCELERATORS) and not only_cpu()
    return sys.platform == "linux" and not elsewhere


def with_tunable(name: str, value: str) -> dict[str, str]:
    """The variable that sets a tunable of glibc's beside those set; nothing where it is set."""
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if name in chosen:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (chosen, f"{name}={value}")))}


def preloading(library: Path | None) -> dict[str, str]:
    """The variable that preloads a library; nothing where there is none, or the user chose one."""
    return {} if library is None or "LD_PRELOAD" in os.environ else {"LD_PRELOAD": str(library)}


def restart(changes: Mapping[str, str]) -> NoReturn:
    """Run this command from its start with variables that are read there alone. The process stays
    the same."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], for_child(changes))


def leave_gpu_memory() -> None:
    """Let JAX take a GPU's memory as it needs it, unless the user said how: others need some."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def set_default_platform_quiet() -> None:
    """Keep TPU and C++ start-up chatter off the terminal unless the user asked for it."""
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
