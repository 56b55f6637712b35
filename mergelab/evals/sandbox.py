"""Run a program that a model wrote, and say whether it ran to its end without an error.

Every program gets an interpreter of its own: no environment of ours, an empty working folder that is removed
afterwards, no input, limits on time, memory and file size, and, where the system lets us, no network and a process
space that dies with it. This keeps accidents small. It is no wall against an attacker: the program runs as the user
and can read what the user can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache

TIMEOUT_SECONDS = 3.0
"""What the graders of HumanEval and MBPP allow a program."""

GRACE_SECONDS = 5.0
"""For the interpreter to start, and to end when the program holds on to its alarm."""

MEMORY_BYTES = 4 * 2**30
FILE_BYTES = 16 * 2**20

_NAMESPACES = (
    ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
    ("--net", "--pid", "--fork", "--kill-child"),
)

# What HumanEval's own checker takes away before it runs a program; the same here, so that the same programs pass.
_TAKEN = {
    "builtins": "exit quit help",
    "os": "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate "
    "replace unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir",
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
}
_HIDDEN = ("ipdb", "joblib", "resource", "psutil", "tkinter")

# There they are loaded already; loaded later, they miss what was taken away.
_LOADED = ("numpy", "pandas", "scipy")

# As in that checker, the program has no name of its own (`__name__` is not `__main__`), and reading input is an error.
_RUNNER = """
import contextlib, importlib, io, json, os, resource, signal, sys
asked = json.loads(sys.stdin.buffer.read())
write, leave, alarm, channel = os.write, os._exit, signal.setitimer, os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(null, number)
for name, most in asked["limits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(getattr(resource, name), (most, most))
class Closed(io.StringIO):
    def read(self, *_): raise OSError
    readline = readlines = read
    def readable(self): return False
def late(*_):
    raise TimeoutError
for name in asked["loaded"]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for module, names in asked["taken"].items():
    for name in names.split():
        setattr(importlib.import_module(module), name, None)
sys.modules.update(dict.fromkeys(asked["hidden"]))
closed = sys.stdin = Closed()
signal.signal(signal.SIGALRM, late)
try:
    with contextlib.redirect_stdout(closed), contextlib.redirect_stderr(closed):
        alarm(signal.ITIMER_REAL, asked["seconds"])
        try:
            exec(asked["program"], {})
        finally:
            alarm(signal.ITIMER_REAL, 0)
except BaseException:
    leave(1)
write(channel, asked["token"].encode())
leave(0)
"""


def runs(program: str, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Return whether a program ends by itself, in time, without raising.

    Leaving early (``sys.exit``, ``os._exit``), reading input, or printing the right word is not passing.

    Args:
        program: Python source.
        seconds: Wall time it may take, not counting the start of the interpreter.
    """
    token = secrets.token_hex(16)
    limits = {
        "RLIMIT_CPU": int(seconds) + 2,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_CORE": 0,
    }
    asked = {
        **{"program": program, "seconds": seconds, "token": token},
        **{"limits": limits, "taken": _TAKEN, "hidden": _HIDDEN},
        "loaded": [name for name in _LOADED if name in program],
    }
    with tempfile.TemporaryDirectory(prefix="mergelab-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*isolation(), sys.executable, "-I", "-c", _RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            said = process.communicate(json.dumps(asked).encode("ascii"), seconds + GRACE_SECONDS)[0]
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            _end(process)
    return said == token.encode()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and whatever it has started in its process group."""
    # When all of it has ended; macOS calls that a lack of permission.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@cache
def isolation() -> tuple[str, ...]:
    """Return the command that cuts a program off from network and processes, or nothing where none works here."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    for options in _NAMESPACES:
        command = (unshare, *options)
        tried = subprocess.run([*command, sys.executable, "-I", "-c", ""], capture_output=True, check=False)
        if tried.returncode == 0:
            return command
    return ()


def describe_isolation() -> str:
    """Return what the sandbox of this machine holds back."""
    if isolation():
        return "programs run with limits, without network, in a process space of their own"
    return "programs run with limits; this system does not let us cut off the network (no user namespaces)"
