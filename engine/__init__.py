"""The real thing: schedules compiled to streams, events and kernels, and trained with."""
