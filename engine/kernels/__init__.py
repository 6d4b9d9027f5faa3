"""Attention kernels: one adapter a file, which loads its package when it is first called.

Each has NAME (sim.kernels declares its workspace), PACKAGE and MODULE (what has to be installed), and says what it refuses. forward
returns (out, lse): the given ones where it can write into them, else its own. backward takes a merged (out, lse), its own or another's.
"""
