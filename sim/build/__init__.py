"""Builders: model x strategy x sequence -> schedule. The only place where the order of operations is chosen."""
