"""Validate: is the prediction right on configurations that no calibration saw? A grid drawn by a seed, predicted, run, and held against bars.

case     one configuration            grid     which ones are drawn             calibration   profiles of this machine, and their own errors
predict  a prediction and its rivals  rows     the CSV                          bars          what has to hold
report   what is printed and drawn    record   what was asked for               run           the order of it all
by       what another profile says
"""
