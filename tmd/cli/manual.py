"""The manual page tmd(8), generated from the verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmd.cli.described import (
    argument_name,
    arguments_of,
    executable_verbs,
    options_of,
    plain_default,
)

HEAD = """\
.TH TMD 8 "" "tmd {version}" "System Administration"
.SH NAME
tmd \\- keep a distributed PyTorch training job running while machines fail
.SH SYNOPSIS
.B tmd
.RI [ options ]
.I verb
.RI [ arguments ]
.SH DESCRIPTION
A warm standby takes over the rank of a machine that fails, slows down or is drained, inside the
running job.
.B tmd daemon
runs on each host, normally as the systemd service
.IR tmd.service .
.B tmd launch
starts the workers of a job.
.SH VERBS
"""
TAIL = """\
.SH FILES
.TP
.I /etc/tmd/tmd.toml
The configuration.
.B tmd config init
writes one to start from.
.TP
.I /etc/tmd/secret
The secret of the cluster, the same on all hosts.
.SH ENVIRONMENT
.TP
.B TMD_CONFIG
The configuration file, instead of
.IR /etc/tmd/tmd.toml .
.TP
.BI TMD_ SECTION __ KEY
Sets one key of the configuration, for example
.BR TMD_REDIS__URL .
.SH EXIT STATUS
0 on success, 1 on failure, 2 for wrong usage or configuration, 130 after an
interrupt. Verbs with further statuses list them above.
.SH SEE ALSO
.BR systemctl (1),
.BR journalctl (1)
"""


def page(root: Any, version: str) -> str:
    """The page of the command ``root``, with all verbs of its groups loaded."""
    return "".join([HEAD.format(version=version), *map(_entry, executable_verbs(root)), TAIL])


def _entry(verb: tuple[tuple[str, ...], Any]) -> str:
    path, command = verb
    arguments, options = arguments_of(command), options_of(command)
    names = " ".join(argument_name(p) for p in arguments)
    lines = [f".SS {_plain(' '.join(path))} {_plain(names)}".rstrip()]
    lines.append("\n.PP\n".join(map(_plain, _paragraphs(command.help))))
    for parameter in (*arguments, *options):
        lines += [".TP", f".B {_plain(_signature(parameter))}", _plain(_description(parameter))]
    return "\n".join(lines) + "\n"


def _signature(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return argument_name(parameter)
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    negative = "".join(f" / {name}" for name in parameter.secondary_opts)
    return ", ".join(sorted(parameter.opts, key=len)) + negative + value


def _description(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()) or "See above."
    default = plain_default(parameter)
    stated = default is None or "[default" in text
    return text if stated else f"{text} [default: {default}]"


def _paragraphs(text: str | None) -> Sequence[str]:
    paragraphs = [" ".join(part.split()) for part in (text or "").split("\n\n")]
    return [part for part in paragraphs if part]


def _plain(text: str) -> str:
    """``text`` for roff: no line is a request, and hyphens stay ASCII, so they can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in text)
    return f"\\&{text}" if text.startswith((".", "'")) else text
