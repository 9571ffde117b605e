"""The exception tree. Types are named for the party at fault and the caller's next action.

TmdError
├── ConfigError         the user's configuration is wrong; the message names key, place and remedy
├── IllegalTransition   a bug in tmd: an event that a state table does not allow; nothing changed
├── StaleLease          a newer leader exists; the caller must stop acting
├── Conflict            the record changed meanwhile; read again and decide again
├── DrainRefused        a drain request that bars the host more stands; withdraw that one first
├── StoreUnavailable    Redis cannot be reached; decisions wait, training continues
│   └── HostNameTaken   another machine has this host name; its heartbeats stay
├── WireError           the peer on the Unix socket sent bytes that violate our protocol
├── PluginError         a plug-in cannot be loaded or broke its contract; names plug-in and origin
├── LinkError           a link between workers failed or was refused
│   ├── LinkRefused     the peer says that we are no member, have another key, epoch or version
│   └── LinkTimeout     nobody called within the time that the caller gave
└── StateMismatch       the state to be moved does not fit; the message names tensors and shapes
"""

from tmd.core.values.reasons import kind_in_words


class TmdError(Exception):
    """Base of all errors raised by tmd. Each has a text."""

    def __str__(self) -> str:
        return super().__str__() or kind_in_words(self)


class ConfigError(TmdError):
    """The configuration is wrong; the message names the key, the place and the remedy."""


class IllegalTransition(TmdError):
    """An event that a state table does not allow. Nothing has changed."""


class StaleLease(TmdError):
    """A newer leader exists: stop acting at once (invariant I5).

    Args:
        fence: the lease epoch under which the job was last written; 0 if unknown.
    """

    def __init__(self, message: str, fence: int = 0) -> None:
        super().__init__(message)
        self.fence = fence


class Conflict(TmdError):
    """The record changed since it was read: read again, decide again."""


class DrainRefused(TmdError):
    """A drain request on which somebody may rely stands, and the new one promises less."""


class StoreUnavailable(TmdError):
    """Redis cannot be reached. Decisions wait; training continues."""


class HostNameTaken(StoreUnavailable):
    """Another machine writes the heartbeat of this host, which stays as it is."""


class WireError(TmdError):
    """The peer on the Unix socket does not speak this protocol."""


class PluginError(TmdError):
    """A plug-in cannot be loaded or broke its contract."""


class LinkError(TmdError):
    """A link between two workers failed; the step is poisoned."""

    arrived = 0
    """Bytes of the message that had arrived when the link broke."""


class LinkRefused(LinkError):
    """One end of a link takes the other for no member, or for one with another key, epoch or
    version. It said so, or ended the handshake in order; a connection that breaks says nothing."""


class LinkTimeout(LinkError):
    """Nobody called within the time that the caller gave."""


class StateMismatch(TmdError):
    """The state to be moved does not fit this worker."""
