"""The one error that bad input raises, and what is said of those of libraries."""

_INTERNALS = ("\n    full_key:", "\nConfig search path:")  # from here on, libraries describe themselves


class ConfigError(ValueError):
    """A setting or an input file cannot be used; the message names the setting to change."""


def explain(error: BaseException) -> str:
    """The message of ``error`` and of what caused it, without what they say of their library."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        message = str(cause)
        for internals in _INTERNALS:
            message = message.partition(internals)[0]
        messages.append(message.strip())
        cause = cause.__cause__
    return "\n".join(dict.fromkeys(messages))
