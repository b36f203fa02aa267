"""Errors a user can act on."""


class ConfigError(ValueError):
    """Bad input: the message names the setting to change and its legal values."""
