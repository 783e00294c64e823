"""Problems that are drawn, computed and judged on a device: what `check` loads with `sweep=`."""
