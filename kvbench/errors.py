"""The one error that bad input raises."""


class ConfigError(ValueError):
    """A setting or an input file cannot be used; the message names the setting to change."""


def explain(error: BaseException) -> str:
    """The message of ``error`` and of what caused it, one line each."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause).strip())
        cause = cause.__cause__
    return "\n".join(dict.fromkeys(messages))
