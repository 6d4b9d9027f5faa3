"""Schedules of long-sequence training: build them, prove them, price them. No torch anywhere in this package."""
