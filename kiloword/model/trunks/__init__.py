"""Trunks: towers of other libraries, whose tokens a tower of kiloword takes in place of patches or words."""
