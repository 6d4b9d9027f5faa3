"""Backends: streams, events and arenas. One file each, behind the interface of base.py."""
