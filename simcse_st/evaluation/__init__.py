"""Models -> numbers, tables and figures."""
