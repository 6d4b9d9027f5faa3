"""Microbenchmarks: what the engine's timelines do not tell about a machine: streams together, other sizes, shapes and kernels, the host.

table: one entry a kind; measure: all of them in turns, at the steady clock; together: what slows what; host: what the host thread pays;
fit: what a machine file takes from it.
"""
