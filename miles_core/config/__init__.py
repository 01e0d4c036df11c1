"""Configuration: dataclasses that become flags, files and facts."""

from miles_core.plugin.option import option

__all__ = ["option"]
