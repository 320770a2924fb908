"""The ``ghoffload`` command: hands over to the module of the command that was asked for.

A command is a module with ``add_arguments(parser)`` and ``main(args)``, which returns the exit
code (``None`` is 0). It is imported only when it is asked for, so ``ghoffload --help`` answers at
once and one command's missing requirement does not stop another.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ghoffload._version import __version__
from ghoffload.errors import GhoffloadError

_COMMANDS = {
    "demo": "train a small GPT with offloaded optimizer state, and beside it without",
    "check": "check this machine: kernels bit for bit, waits, a short training against torch",
    "doctor": "say what this machine is, what will be used and why, and what is wrong",
    "bandwidth": "measure this machine's link and memories: GB/s by kind, size and CTAs, latencies",
    "sweep": "try settings, here or on a simulated machine: step time, exposed time, memory",
    "watch": "show what running processes hold and move: memory, link traffic, steps a second",
}
_MODULES = {"sweep": "sweeping"}  # ghoffload.sweep is a function
_USAGE = 2  # argparse's exit code for a command line it cannot read
_INTERRUPTED = 130  # the shell's code for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``ghoffload``; those of this process where ``None``.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for a command line that cannot be read.
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as stop:  # argparse has already said why
        return stop.code if isinstance(stop.code, int) else _say(stop.code)
    except GhoffloadError as error:
        print(f"ghoffload: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ghoffload: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _say(message: object) -> int:
    """As the interpreter ends on ``SystemExit``: nothing is success, text is a failure."""
    if message is None:
        return 0
    print(message, file=sys.stderr)
    return 1


def _run(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return _USAGE
    if args.command not in _COMMANDS:
        expected = ", ".join(_COMMANDS)
        parser.error(f"expected a command, one of {expected}; got {args.command!r}")
    command = argparse.ArgumentParser(
        prog=f"ghoffload {args.command}", description=_COMMANDS[args.command].capitalize() + "."
    )
    module = importlib.import_module(f"ghoffload.{_MODULES.get(args.command, args.command)}")
    module.add_arguments(command)
    code = module.main(command.parse_args(args.arguments))
    return 0 if code is None else int(code)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in _COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="ghoffload",
        usage="ghoffload [--help] [--version] command ...",
        description="Train with optimizer state in host memory.",
        epilog="\n".join(["commands:", *lines, "", "'ghoffload COMMAND --help' has the options."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ghoffload {__version__}")
    parser.add_argument("command", nargs="?", help="what to do; see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
