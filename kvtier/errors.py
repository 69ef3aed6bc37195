"""Every error that kvtier raises.

A miss is never an error: lookups, loads and saves answer with values and counted reasons. What is raised here tells a
caller what to change.

    Exception
    +-- KVTierError                  .retryable says whether the same call may succeed later
    |   +-- ConfigError              a kvtier.toml, a size or a path that cannot work
    |   +-- CodecError
    |   |   +-- UnknownCodec         no codec of that name or number in this version
    |   |   +-- UnsupportedKV        this KV cannot be stored: layout, dtype, layer kind, NaN or Inf
    |   |   +-- CorruptPayload       stored bytes are not what was written
    |   +-- PoolFull                 retryable: a pool of pages or of sequences has no room now
    |   +-- TierError
    |   |   +-- TierFull             retryable
    |   |   +-- TierUnavailable      retryable
    |   +-- SessionError
    |       +-- DeadlineExceeded     retryable
    |       +-- SessionUnavailable   retryable: nobody answers at the door
    |       +-- ProtocolMismatch     client and server speak different versions
    |       +-- Unauthenticated
    |       +-- OverQuota            retryable
    +-- RuntimeError
        +-- UsageError               the caller's own bug
            +-- ClosedError          used after close()
            +-- KVMismatch           a tensor's shape, dtype or device is not what the keyspace says
            +-- BadTokens            token ids that are not unsigned 32-bit integers
"""


class KVTierError(Exception):
    """Root of the errors that a caller can act on."""

    retryable = False


class ConfigError(KVTierError):
    """A configuration that cannot work; the message names the field and what to set."""


class CodecError(KVTierError):
    """Something about encoding or decoding a block."""


class UnknownCodec(CodecError):
    """No codec of that name or number exists in this version."""


class UnsupportedKV(CodecError):
    """This KV cannot be stored."""


class CorruptPayload(CodecError):
    """Stored bytes are not what was written."""


class PoolFull(KVTierError):
    """A pool of pages or of sequences has no room now; nothing of what was asked for was done."""

    retryable = True


class TierError(KVTierError):
    """A tier refused or failed."""


class TierFull(TierError):
    """The tier has no room now."""

    retryable = True


class TierUnavailable(TierError):
    """The tier does not answer or has turned itself off."""

    retryable = True


class SessionError(KVTierError):
    """A session with a kvtier host failed."""


class DeadlineExceeded(SessionError):
    """The host did not answer in time."""

    retryable = True


class SessionUnavailable(SessionError):
    """Nobody answers at the host's door."""

    retryable = True


class ProtocolMismatch(SessionError):
    """Client and host speak different protocol versions."""


class Unauthenticated(SessionError):
    """The host does not accept these credentials."""


class OverQuota(SessionError):
    """The session holds as much as it may."""

    retryable = True


class UsageError(RuntimeError):
    """The caller's own bug; not part of the `KVTierError` tree, so that it is not swallowed with it."""


class ClosedError(UsageError):
    """Used after it was closed."""


class KVMismatch(UsageError):
    """A tensor's shape, dtype or device is not what the keyspace says."""


class BadTokens(UsageError):
    """Token ids that are not unsigned 32-bit integers."""
