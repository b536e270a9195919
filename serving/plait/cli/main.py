"""The `plait` command: finds the module of the sub-command and hands over to it.

Only that module is imported, so `plait --help` takes a few hundredths of a second although some commands need torch
and Ray. Each command module has a `typer.Typer` called `app`.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

COMMANDS = {
    "serve": "run the server (local Ray, or attach to one)",
    "generate": "make an image without a server",
    "recommend": "rank items without a server",
    "models": "list, verify and package models, ControlNets, LoRAs and recommenders",
    "deploy": "render manifests for Ray Serve",
    "tune": "find the cheapest configuration that is fast enough, by measuring",
    "loadtest": "measure a server under load; compare two reports",
    "bench": "side-by-side benchmarks (in a clone of the repository)",
    "links": "models of RDMA links: list, calibrate",
    "demo": "start, make images, show them, stop",
    "audit": "show where a compiled model differed from torch",
    "doctor": "check this machine and this installation",
    "completion": "print what completes commands in a shell",
}

_STDERR = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (the console script exits with it)."""
    _open_streams()
    try:
        code = _told(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()  # whoever read it has had enough
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        if error.filename is None:
            _drop_output()
        print(f"plait: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


def _open_streams() -> None:
    """Have what a command was started without (`>&-`) lead nowhere: else the next file that it opens is its output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(_STDERR, "w", closefd=False)


def _drop_output() -> None:
    """Lead stdout nowhere: Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _told(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] == "--complete":
        from plait.cli.completion import candidates

        line = os.environ.get("COMP_LINE", "")
        print("\n".join(candidates(line[: int(os.environ.get("COMP_POINT") or len(line))], COMMANDS)))
        return EXIT_OK
    if arguments[0] in ("-V", "--version"):
        print(f"plait {_version()}")
        return EXIT_OK
    name, *rest = arguments
    if name not in COMMANDS:
        from plait_serving.spelling import hint

        print(f"plait: there is no command {name!r}{hint(name, COMMANDS)} (plait --help lists them)", file=sys.stderr)
        return EXIT_USAGE
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    """Run a sub-command; a user-facing error becomes one sentence and exit code 1."""
    from typer import BadParameter, TyperException

    from plait.errors import OrderError, PlaitError
    from plait_autoconfig.errors import TunerError
    from plait_serving.diffusion.errors import EngineError

    try:
        with _ends_in_order():
            module = importlib.import_module(f"plait.cli.{name}")
            code = module.app(args=arguments, prog_name=f"plait {name}", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or EXIT_OK
        print(end.code, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("plait: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (PlaitError, EngineError, TunerError) as error:
        print(f"plait {name}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, OrderError) else EXIT_FAILED
    except TyperException as error:
        if isinstance(error, BadParameter):
            from plait_serving.spelling import plain

            error.message = plain(error.message)
        cast("Any", error).show()  # all that a command line raises have it
        return error.exit_code


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does, also where SIGINT is ignored, as in the background of a script: what
    is half-written is removed, gigabytes of weights among it, and servers that were started end. A command may have a
    handler of its own, which stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return f"""Usage: plait COMMAND [ARGS]...

Images from diffusion models with ControlNets and LoRA sets, and recommendations, served on Ray Serve.

Commands:
{lines}

plait help COMMAND tells more; plait --version prints the version.
Exit codes: 0 done, 1 failed, 2 wrong usage, 99 a threshold was missed, 130 interrupted."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("plait")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
