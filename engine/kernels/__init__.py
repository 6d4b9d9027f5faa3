"""Attention kernels: one adapter a file. Each returns (out, lse), takes a merged (out, lse) in backward, names itself and says what it refuses."""
