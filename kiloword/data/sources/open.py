"""The former place of `kiloword.data.open`."""

from kiloword.data.open import expand, mix, open_data, open_source

__all__ = ["expand", "mix", "open_data", "open_source"]
