"""The one error that bad input raises."""


class ConfigError(ValueError):
    """A setting or an input file cannot be used; the message names the setting to change."""
