"""Errors that a user can act on: one line that names the field, what was found and what is allowed."""

from __future__ import annotations


class DsparkError(Exception):
    """Base of all errors that end a command with one line and exit code 2."""


class ConfigError(DsparkError):
    """A bad option, a broken YAML file, a combination that cannot be supported."""


class RequestError(DsparkError):
    """Something wrong with one request; the others go on."""


class CheckpointError(DsparkError):
    """A checkpoint that cannot be loaded: names file, key, found and expected."""


class DownloadError(DsparkError):
    """The embedded target could not be fetched or is damaged; says what to do."""
