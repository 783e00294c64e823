"""Sample, compute and judge problems on a device; `check` imports it for `sweep=`."""
