"""Tars and tables at URLs: requests, cache, indexes, fetching ahead."""
