"""The sandbox's own program: closes itself in, then runs what it was given. Standard library only.

Run as `python enter.py IN OUT`: descriptors with a dict as a value, and for frames of answers. The
first process makes the spaces, the second is the first in them and ends all when it ends, the
third runs the program, or the tests of a program that runs in another sandbox.
"""

import os
import resource
import signal
import sys
import types

import values  # pyrefly: ignore[missing-import]

try:
    import kernel  # pyrefly: ignore[missing-import]
except (ImportError, AttributeError, OSError):  # no C library as on Linux
    kernel = None

_IN, _OUT = map(int, sys.argv[1:3])


def _main() -> None:
    with os.fdopen(_IN, "rb") as file:
        job = values.decode(file.read(), _no_objects)
    held = {"time"}
    if kernel is not None:
        kernel.die_with_parent()
    separated = kernel is not None and _try(held, (), lambda: kernel.separate(nobody=job["nobody"]))
    if separated:
        held |= {"network", "signals"}
    if separated:
        kernel.die_with_parent()  # a change of user undoes it
    ours = [place for place in (_OUT, job["requests"], job["answers"]) if place is not None]
    second = os.fork()
    if second:
        _wait(second, ours)
    if kernel is not None:
        kernel.die_with_parent()
    if separated:
        _try(
            held, ("writes", "disk"), lambda: kernel.private_folder(job["folder"], job["files_mb"])
        )
    os.chdir(job["folder"])
    third = os.fork()
    if third:
        _wait(third, ours)
    _close_in(job, held, separated)
    lacking = sorted(set(job["required"]) - held)
    _answer({"held": sorted(held), "lacking": lacking})
    if lacking:  # nothing runs that is not held
        os._exit(125)
    _run(job)


def _wait(child: int, descriptors: list) -> None:
    for place in descriptors:  # so that the other end sees when the program closes its own
        os.close(place)
    _, status = os.waitpid(child, 0)
    os._exit(_code(status))


def _try(held, kinds, step) -> bool:
    try:
        step()
    except OSError:
        return False
    held.update(kinds)
    return True


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _close_in(job: dict, held: set, separated: bool) -> None:
    mebi = 1 << 20
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["files_mb"] * mebi,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_AS: job["memory_mb"] * mebi,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    held |= {"memory", "file size"}
    # In a user space of its own the kernel counts only the processes of this sandbox.
    if job["processes"] > 1 and separated and os.getuid() != 0:
        count = job["processes"] + 2  # the two that wait for the program
        resource.setrlimit(resource.RLIMIT_NPROC, (count, count))
        held.add("processes")
    if kernel is None:
        return
    read_only = "writes" in held  # all file systems but the private folder
    version = []
    writable = [job["folder"], "/dev/null"]
    _try(held, ("reads",), lambda: version.append(kernel.only_files(job["readable"], writable)))
    closed, scoped = (bool(version) and version[0] >= least for least in (3, 6))
    held |= {"signals"} if scoped else set()
    alone, loud = job["processes"] == 1, "signals" not in held
    kinds = ["network", "signals"]
    kinds += ["processes"] if alone else []
    kinds += ["writes"] if closed else []
    _try(
        held,
        kinds,
        lambda: kernel.refuse_calls(forks=alone, signals=loud, attributes=not read_only),
    )


def _answer(value: dict) -> None:
    values.send(_OUT, values.encode(value, _no_objects))


def _no_objects(_: object) -> int:
    raise ValueError("only values are sent")


def _run(job: dict) -> None:
    """Run the tests, or the program: as `__main__` for what it prints, or to answer the tests."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    role = job["role"]
    side = types.ModuleType(role) if role == "print" else __import__(role)
    for name in ("judge", "kernel", "program", "values"):  # names that belong to the program now
        sys.modules.pop(name, None)
    sys.path[0] = job["folder"]
    sys.path.extend(job["packages"])
    sys.argv = ["program.py"]
    if role == "judge":
        side.judge(job, _answer)
        os._exit(0)
    space: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    if role == "program":
        sys.modules["program"] = types.ModuleType("program")
        space = vars(sys.modules["program"])
    source, requests, answers = job["program"], job["requests"], job["answers"]
    del job
    code = _execute(source, space)
    if role == "program" and code == 0:
        side.answer(space, requests, answers)
    _flush()
    os._exit(code)


def _execute(source: str, space: dict) -> int:
    try:
        exec(compile(source, "program.py", "exec"), space)
    except SystemExit as error:
        _answer({"error": f"SystemExit: {error.code}"[:300]})
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        _answer({"error": f"{type(error).__name__}: {error}"[:300]})
        return 1
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    _main()
