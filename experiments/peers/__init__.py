"""Peers: who `fpdt bench` lays beside this engine, one a file. Each computes the same block of the same weights on its own part of the same sequence.

A peer has `positions_T` (which tokens of the sequence this rank has), calls as x_TC -> y_TC with autograd, and may close().
"""
