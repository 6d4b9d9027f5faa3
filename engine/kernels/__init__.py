"""Attention kernels: one adapter a file. Each returns (out, lse), takes a merged (out, lse) in backward, and names itself."""
