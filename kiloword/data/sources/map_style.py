"""The former place of `kiloword.data.map_style`."""

from kiloword.data.map_style import MapStyleSource

__all__ = ["MapStyleSource"]
