"""Programs of the kits, each in a process of its own that has torch loaded when it begins.

A server process imports torch and ckptstore once for each worker of pytest, and forks a child for
each program, which takes milliseconds where ``python -m`` takes a second or two.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from types import TracebackType
from typing import Any, Self

from cirules import slowness

__all__ = ["Program", "forkserver", "run_program"]

_PRELOADED = (
    "torch",
    "torch._dynamo",  # a rank's first DTensor imports it, for over a second
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "ckptstore.backends.posix",
    "ckptstore.integrations.dcp.reader", "ckptstore.integrations.dcp.writer",
    "ckptstore.states.lazy", "ckptstore.states.save", "ckptstore.store",
)  # fmt: skip


def forkserver() -> ForkServerContext:
    """Return the context whose processes begin with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


def _main(
    module: str, words: tuple[str, ...], fds: tuple[Any, ...], environ: dict[str, str]
) -> None:
    """Run as ``python -m MODULE WORDS`` does."""
    os.environ.clear()
    os.environ.update(environ)
    for place, fd in enumerate(fds):
        taken = fd.detach()
        os.dup2(taken, place)
        os.close(taken)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.path[:0] = [one for one in environ["PYTHONPATH"].split(os.pathsep) if one not in sys.path]
    sys.argv = [module, *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Program:
    """A running program; a context manager that kills it at its end.

    Parameters
    ----------
    module
        A module of the kits, run as ``python -m`` runs it.
    words
        Arguments of the command line.
    stdin, stdout, stderr
        Files, whose descriptors the program gets.
    """

    def __init__(self, module: str, *words: object, stdin: Any, stdout: Any, stderr: Any) -> None:  # noqa: ANN401 - what has a fileno
        context = forkserver()
        fds = tuple(_Sent(file.fileno()) for file in (stdin, stdout, stderr))
        self._process = context.Process(
            target=_main, args=(module, tuple(map(str, words)), fds, dict(os.environ))
        )
        self._process.start()

    def wait(self, timeout_s: float) -> int:
        """Return the exit code, negative for a signal.

        Raises
        ------
        TimeoutError
            The program still runs.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(self._process.pid)
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class _Sent:
    """A file descriptor that is sent with the start of a process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (_received, (DupFd(self._fd),))


def _received(sent: Any) -> Any:  # noqa: ANN401 - multiprocessing gives it no type
    return sent


def run_program(module: str, *words: object, given: str = "", timeout_s: float = 500.0) -> str:
    """Return the output of a program, which must exit with 0.

    Parameters
    ----------
    module, words
        As of :class:`Program`.
    given
        Text on its standard input.
    timeout_s
        Seconds after which it is killed; more on a slow machine.
    """
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        stdin.write(given.encode())
        stdin.seek(0)
        with Program(module, *words, stdin=stdin, stdout=stdout, stderr=stderr) as program:
            code = program.wait(timeout_s * slowness())
        stdout.seek(0)
        stderr.seek(0)
        assert code == 0, f"{module} exits with {code}: {stderr.read().decode()[-3000:]}"
        return stdout.read().decode()
