"""The kernel's ways to hold a process, through the C library; imports nothing but the standard one.

Each function raises OSError where the kernel refuses. Runs in the sandbox's first process.
"""

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_PRIVATE_RECURSIVE = (1 << 18) | (1 << 14)
_NO_SUID, _NO_DEVICES = 2, 4
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38
_MOUNT_SETATTR, _LANDLOCK = 442, 444  # numbers from 424 on are the same everywhere
_RECURSIVE, _READ_ONLY = 0x8000, 1

_READS = (1 << 2) | (1 << 3)  # a file, a folder
_ALL_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_OF_FILES = (1 << 1) | (1 << 2) | (1 << 14)  # rights that make sense for a file: write, read, cut

# Calls refused inside, as (x86-64, aarch64): sockets, other processes' memory, the kernel's own
# machinery. socketpair stays: it reaches nothing outside.
_REFUSED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
}
_SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_ATTRIBUTES = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_FORKS = {"fork": (57, None), "vfork": (58, None)}
_CLONE, _CLONE3 = (56, 220), 435
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_SET_DEATH_SIGNAL, 9)


def separate(*, nobody: bool) -> None:
    """Give this process a user, network, mount and IPC space of its own, its children one of pids.

    Args:
      nobody: whether to become that user first, for root: the kernel counts no processes of root.
    """
    user, group = os.getuid(), os.getgid()
    if nobody:
        os.setgroups([])
        user = group = 65534
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        _prctl(_SET_DUMPABLE, 1)
    _check(_libc.unshare(_NEW_USER | _NEW_NET | _NEW_PIDS | _NEW_MOUNTS | _NEW_IPC))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def private_folder(path: str, size_mb: int) -> None:
    """Make every file system read-only but a fresh one of limited size at `path`."""
    _mount(b"none", b"/", None, _PRIVATE_RECURSIVE, None)
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    at_here = -100
    _check(
        _libc.syscall(
            _MOUNT_SETATTR, at_here, b"/", _RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
        )
    )
    options = f"size={size_mb}m,nr_inodes=4096,mode=700".encode()
    _mount(b"tmpfs", path.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES, options)


def only_files(readable: list[str], writable: list[str]) -> int:
    """Close every file but those beneath some paths (Landlock).

    Returns:
      The kernel's version of Landlock: from 3 on files cannot be cut short, from 6 on signals to
      processes outside are refused too.
    """
    version = _check(_libc.syscall(_LANDLOCK, None, ctypes.c_size_t(0), 1))
    everything = _ALL_FILES[max(known for known in _ALL_FILES if known <= version)]
    rules = struct.pack("QQQ", everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _check(_libc.syscall(_LANDLOCK, rules, ctypes.c_size_t(size), 0))
    for paths, rights in ((readable, _READS | 1), (writable, everything)):
        for path in paths:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # this machine has no such file
            allowed = rights if os.path.isdir(path) else rights & everything & _OF_FILES
            rule = struct.pack("=Qi", allowed, place)
            _check(_libc.syscall(_LANDLOCK + 1, ruleset, 1, rule, 0))
            os.close(place)
    no_new_privileges()
    _check(_libc.syscall(_LANDLOCK + 2, ruleset, 0))
    os.close(ruleset)
    return version


def no_new_privileges() -> None:
    """Let no program that is started here gain rights."""
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)


def refuse_calls(*, forks: bool, signals: bool, attributes: bool) -> None:
    """Refuse system calls by a filter (seccomp).

    Args:
      forks: whether new processes are refused; threads are not.
      signals: whether signals are refused, to any process.
      attributes: whether owners, modes and times of files are kept, which Landlock does not do.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(_ENOSYS, f"the call numbers of {machine} are not known here")
    column, architecture = _MACHINES[machine]
    tables = ((True, _REFUSED), (signals, _SIGNALS), (attributes, _ATTRIBUTES), (forks, _FORKS))
    numbers = [both[column] for wanted, table in tables if wanted for both in table.values()]
    load, equal, above, tested, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, _KILL),
        (load, 0, 0, 0),
        (above, 0, 1, 0x40000000),  # the other numbering of x86
        (answer, 0, 0, _ERROR | _EPERM),
    ]
    for number in numbers:
        if number is not None:
            program += [(equal, 0, 1, number), (answer, 0, 0, _ERROR | _EPERM)]
    if forks:  # the flags of clone3 lie in memory that a filter cannot see: libc falls back
        program += [
            (equal, 0, 1, _CLONE3),
            (answer, 0, 0, _ERROR | _ENOSYS),
            (equal, 0, 3, _CLONE[column]),
            (load, 0, 0, 16),
            (tested, 1, 0, 0x10000),  # a thread
            (answer, 0, 0, _ERROR | _EPERM),
        ]
    program.append((answer, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    whole = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    no_new_privileges()
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(whole))


def _prctl(option: int, *values: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded))


def _mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
